module lanes

go 1.18

require (
	google.golang.org/grpc v1.58.3
	google.golang.org/protobuf v1.31.0
)
