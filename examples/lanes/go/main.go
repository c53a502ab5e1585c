// A vehicle program in Go: lanes as they come, events without a gap, the vehicle's speed.
//
//	lanes 127.0.0.1:8001 lanes [COUNT]             of all cameras
//	lanes 127.0.0.1:8001 events LAST_ID [COUNT]    a file that keeps the last id
//	lanes 127.0.0.1:8001 vehicle SPEED_MPS [off|left|right|hazard [SECONDS]]
//
// COUNT ends the program after so many; SECONDS has it send the state for so long, ten times a
// second. README.md says how it is built.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	v1 "lanes/edge/lanes/v1"
)

const window = 2

// mayPass reports whether to connect again: the daemon restarts, or a TCP connection has reached
// its age.
func mayPass(err error) bool {
	code := status.Code(err)
	return errors.Is(err, io.EOF) || code == codes.Unavailable || code == codes.ResourceExhausted
}

// showLanes prints the lanes of every frame, and returns how many before the stream ended.
func showLanes(service v1.LaneServiceClient, most int) (shown int, err error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stream, err := service.StreamLanes(ctx)
	if err != nil {
		return 0, err
	}
	if err := stream.Send(&v1.StreamLanesRequest{Window: window}); err != nil && err != io.EOF {
		return 0, err
	}
	for {
		response, err := stream.Recv()
		if err != nil {
			return shown, err
		}
		frame := response.GetFrame()
		offset := "-"
		if ego := frame.GetEgo(); ego != nil && ego.LateralOffsetM != nil {
			offset = fmt.Sprintf("%+.2f", *ego.LateralOffsetM)
		}
		reasons := ""
		for _, reason := range frame.GetReasonDetails() {
			reasons += ", " + strings.TrimPrefix(reason.GetCode().String(), "REASON_CODE_")
		}
		fmt.Printf("%s %d %s %d ms, %d lanes, offset %s m, lost %d%s\n", frame.GetCamera(),
			frame.GetFrameId(), strings.TrimPrefix(frame.GetStatus().String(), "FRAME_STATUS_"),
			frame.GetTime().GetAgeUs()/1000, len(frame.GetLanes()), offset, response.GetLost(), reasons)
		shown++
		if shown == most {
			return shown, nil
		}
		// Acknowledged once it is used: at most `window` are on their way, so none grows old. An
		// error of Send is one of the next Recv.
		_ = stream.Send(&v1.StreamLanesRequest{Acknowledged: response.GetSequence()})
	}
}

// showEvents prints every event once, across restarts of the daemon and of this program.
func showEvents(service v1.LaneServiceClient, file string, most int) (shown int, err error) {
	var lastID uint64
	if text, err := os.ReadFile(file); err == nil {
		if lastID, err = strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64); err != nil {
			return 0, err
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stream, err := service.StreamEvents(ctx, &v1.StreamEventsRequest{AfterId: &lastID})
	if err != nil {
		return 0, err
	}
	for {
		response, err := stream.Recv()
		if err != nil {
			return shown, err
		}
		event := response.GetEvent()
		camera := event.GetCamera()
		if camera == "" {
			camera = "-"
		}
		fmt.Println(event.GetId(), strings.TrimPrefix(event.GetKind().String(), "EVENT_KIND_"),
			strings.TrimPrefix(event.GetPhase().String(), "EVENT_PHASE_"), event.GetCause(), camera)
		// After it is dealt with: a program that dies in between sees it again. The file is replaced
		// as a whole, so that it is never an empty one where the power fails.
		if err := os.WriteFile(file+".new", []byte(strconv.FormatUint(event.GetId(), 10)), 0o644); err != nil {
			return shown, err
		}
		if err := os.Rename(file+".new", file); err != nil {
			return shown, err
		}
		shown++
		if shown == most {
			return shown, nil
		}
	}
}

// sendVehicleState gives the vehicle's state, as a vehicle does: the daemon uses a state for half a
// second. The words are the speed, the indicator and the seconds; the last two may be missing.
func sendVehicleState(service v1.LaneServiceClient, words []string) error {
	if len(words) == 1 {
		words = append(words, "off")
	}
	if len(words) == 2 {
		words = append(words, "0")
	}
	speed, err := strconv.ParseFloat(words[0], 64)
	if err != nil {
		return err
	}
	indicator, known := v1.Indicator_value["INDICATOR_"+strings.ToUpper(words[1])]
	if !known {
		return fmt.Errorf("the indicator is off, left, right or hazard, not %s", words[1])
	}
	seconds, err := strconv.ParseFloat(words[2], 64)
	if err != nil {
		return err
	}
	state := &v1.SetVehicleStateRequest{SpeedMps: &speed, Indicator: v1.Indicator(indicator)}
	until := time.Now().Add(time.Duration(seconds * float64(time.Second)))
	for first := true; ; first = false {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_, err = service.SetVehicleState(ctx, state)
		cancel()
		if err != nil {
			return err
		}
		if first {
			fmt.Println("taken")
		}
		if !time.Now().Before(until) {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func run(address, verb string, words []string) error {
	channel, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer channel.Close()
	service := v1.NewLaneServiceClient(channel)
	if verb == "vehicle" {
		return sendVehicleState(service, words)
	}
	counts := words
	if verb == "events" {
		counts = words[1:]
	}
	most := 0
	if len(counts) > 0 {
		if most, err = strconv.Atoi(counts[0]); err != nil {
			return err
		}
	}
	for all := 0; ; {
		var shown int
		if verb == "lanes" {
			shown, err = showLanes(service, most-all)
		} else {
			shown, err = showEvents(service, words[0], most-all)
		}
		all += shown
		if most > 0 && all >= most {
			return nil
		}
		if !mayPass(err) {
			return err
		}
		fmt.Fprintln(os.Stderr, "the stream ended:", err)
		time.Sleep(500 * time.Millisecond)
	}
}

func main() {
	args := os.Args[1:]
	if len(args) < 2 || (args[1] != "lanes" && len(args) < 3) {
		fmt.Fprintln(os.Stderr, "usage: lanes ADDRESS lanes [COUNT] | events LAST_ID [COUNT] | vehicle SPEED [off|left|right|hazard [SECONDS]]")
		os.Exit(2)
	}
	if err := run(args[0], args[1], args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
