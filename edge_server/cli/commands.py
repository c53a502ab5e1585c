"""The verbs of the command line, each with its help, which is its declaration.

The first line of a verb has its words, `module:function` below edge_server, and its help in short.
A verb without a function has verbs below it. Then come its arguments (see `verbs.add_arguments`),
where `@name` stands for those that several verbs have, and `@settings` for the flags of all
settings, which are in `flags`; what it is about; examples behind `$`; exit codes; and behind `!`
what is printed when a user interrupts it, or one below it.
"""

from __future__ import annotations

COMMANDS = """\
run | cli.run:run | the daemon
    @settings
  Runs the daemon until SIGTERM.

check | cli.run:run_check | validate settings and model repository, start nothing
    @settings
    --strict  what has no effect is an error
  Finds what `run` would trip over with these flags; without any, with /etc/edge_server/config.toml.

models | | deliver, list, verify and sign models
  Delivers models so that a daemon which follows the repository never sees half of one: a copy
  under a dot name, with a manifest of every file's size and sha256, then one rename. The previous
  content is kept for `rollback`. Leftovers of editors and Python (.*, *~, *.tmp, __pycache__) are
  not copied.

  A repository is a directory, or [USER@]HOST:DIRECTORY, reached with ssh; that host needs
  edge-server in the PATH of that user.
  exit codes: 0 done, 1 failed (verify: it is not what its manifest says, or not signed by that
  key; push, rollback: the daemon refused it or rolled it back, or other content took its place
  before the daemon decided), 2 usage, 69 the host or the daemon cannot be reached, 75 the daemon
  has not decided yet, 78 no such model, or it or a key cannot be used; the text says why, 130
  interrupted
  ! edge-server: interrupted; no half model is left

models push | cli.models:push | put a model into a repository
    DIR  the model's directory, which has its name
    --to REPO!  the repository
    --version VERSION  only this version; the rest of the model in REPO is kept
    --sign KEY  sign it with this private key
    --allow-interface-change  permit other names, types or shapes, which may break callers of the
        model that it replaces
    --in-place  leave the manifest, and the signature, in DIR as well
    @waiting
    @store
    @ssh
  $ new/laneDetect_model --to /srv/models --sign release.key
  $ new/laneDetect_model --to root@truck-7:/srv/models --wait

models accept | cli.models:accept | put a model into a repository that comes as an archive on stdin
    --to DIR!  where to
    @waiting
    @store
  $ --to /srv/models < laneDetect_model.tar

models pull | cli.models:pull_model | fetch a model and check it against its manifest
    MODEL|URL  s3://BUCKET/KEY, https://HOST/PATH or oci://REGISTRY/REPOSITORY:TAG is a URL; one
        of the first two that ends with / is a model's directory with its manifest, any other an
        archive
    --from REPO  where from, for a MODEL
    --to DIR!  it becomes DIR/MODEL; '-' writes an archive to stdout, as `accept` reads it
    --name NAME  what a URL's model becomes
    --sha256 D  of a URL's archive, or of its manifest; other content is refused
    @ssh
  $ laneDetect_model --from truck-7:/srv/models --to .
  $ https://models.example/laneDetect_model.tar --to /srv/models

models publish | cli.fleet:publish | say which model the vehicles of a channel have
    [DIR]  the model's directory; default: the model that the channel has
    --channel URL!  oci://REGISTRY/REPOSITORY:TAG, as repository.channels of the vehicles has it
    --share PERCENT!  of the vehicles, 0 to 100; those of a smaller share are in each larger one
    --sign KEY!  sign the index, and the model, with this private key
    --not-before TIME  when vehicles may take it, like 2026-12-01T03:00+01:00; default: at once
    --not-after TIME  and until when; default: always
    --parked S  only where the vehicle's speed has been 0 for so long
    --max-celsius X  only where no zone of the board is warmer
    --allow-interface-change  as of push
  Sends the model to a registry and writes the channel's index, with its signature and the next
  serial. Without DIR the model, and the times and conditions that are not given, stay as they are.
  To take a model back, publish the one before.

  A vehicle of the share fetches the model into its repository, where it is checked, watched and
  rolled back as after a push. `fleet status` shows what became of it.
  $ new/laneDetect_model --channel oci://registry.example/lanes:stable --share 1 --sign fleet.key
  $ --channel oci://registry.example/lanes:stable --share 10 --sign fleet.key

models list | cli.models:show | list a repository's models, and whether each matches its manifest
    [REPO]  default: models
    --inventory NAME  ==SUPPRESS==
    --json  a list of objects, with whole digests
    @keys
    @store
    @ssh
  $ /srv/models
  $ truck-7:/srv/models --json

models verify | cli.models:verify | check a model against its manifest
    DIR  the model's, or REPO/NAME
    @keys
  $ /srv/models/laneDetect_model --key release.key.pub

models rollback | cli.models:undo_push | restore a model as before its last push; again undoes it
    NAME
    --to REPO!  the repository
    --to-last-good  restore what the daemon that follows REPO last found good, regardless of later
        pushes
    @waiting
    @store
    @ssh
  $ laneDetect_model --to /srv/models
  $ laneDetect_model --to m --wait

models release | cli.models:release_model | take a model out of quarantine; it is tried again
    NAME
    --digest D  only content whose digest begins with D; default: all of that model
    @store
  $ laneDetect_model

models promote | cli.models:promote | put a candidate in the place of the model beside which it ran
    NAME  the candidate
    --to REPO!  the repository that has it
    --as MODEL  the model whose place it takes; default: the one that the daemon compares it with
    --force  without a good verdict of the daemon that follows REPO
    @waiting
    @store
    @ssh
  $ lane_candidate --to /srv/models --until-passed
  $ lane_candidate --to root@truck-7:/srv/models --wait
models env | cli.model_env:make_environments | make what a Python model's requirements.txt names
    DIR  the model; each of its versions has a requirements.txt of its own, or none
    --to DIR  the state directory of the daemon; default: the installed one's, else yours
    @config
  For each requirements.txt beside a model.py this has pip make a directory of packages, which the
  model imports before those of edge-server. What has been made of the same text is taken as it is.
  The packages are of the Python that runs the model: edge-server's own, or what interpreters or
  model_interpreters of [python] name for it.
  $ /srv/models/preprocess

models sign | cli.models:sign | write a model's manifest and signature into its directory
    DIR  the model
    --key KEY!  the private key
  $ new/laneDetect_model --key release.key

models keygen | cli.models:keygen | make a key to sign models with
    --out KEY!  the public one becomes KEY.pub
  $ --out release.key

fleet | | show what the vehicles of a fleet report
  What the vehicles of a fleet have retained at its broker.
  exit codes: 0 done, 1 a vehicle has refused or rolled back what a channel brought, or refuses its
  index, 2 usage, 69 the broker cannot be reached, 78 the settings are wrong

fleet status | cli.fleet:status | show which vehicle serves what, since when, and who is silent
    --config FILE  settings whose [mqtt] is the fleet's broker, as a client that may read all topics
    --mqtt HOST[:PORT]  or its address alone
    --json  a list of objects
    --quiet-secs S = 2  the retained states are complete once none came for so long
  A vehicle is silent if it is offline, or if its health is older than a minute.
  $ --mqtt broker.example
  $ --config fleet.toml --json

plan | | build, inspect and verify TensorRT plans
  TensorRT plans of a model's ONNX file. A plan belongs to one GPU with one TensorRT: build it on
  the device that runs it, and again after an update. The ONNX file is the source.

  MODEL is a model's name in the repository, its directory, or an ONNX file.
  exit codes: 0 done, 1 failed (verify: the plan's outputs differ from the ONNX file's; refresh: a
  model is left without a plan that fits), 2 usage, 69 no GPU or no TensorRT here, 78 no such
  model, or it or a flag's value cannot be used; the text gives the reason, 130 interrupted
  ! edge-server: interrupted; nothing was changed

plan build | tools.plan:build_plan | build a model's plan on this device
    --out FILE  the plan; default: beside the ONNX file
    --calibration DIR  typical inputs for INT8 (TensorRT up to 10): DIR/*.npy, or
        DIR/<input>/*.npy
    --min SHAPES...  least shapes, like input:1x3x360x640; once for each profile
    --opt SHAPES...  usual shapes, likewise
    --max SHAPES...  largest shapes, likewise
    --dla-core CORE  build for NVDLA
    --max-gpu-layers COUNT  fail where more fall back to the GPU
    --workspace N  MiB that a layer may take; default: 1024
    --memory-limit N  MiB of the host's memory, for the build
    --fp16  layers may calculate in FP16 (TensorRT up to 10)
    --int8  layers may calculate in INT8 and FP16: with Q/DQ nodes, or with --calibration
    --strongly-typed  calculate as the ONNX file is typed, as TensorRT 11 always does (10)
    --gpu  build for the GPU, regardless of the configuration
    --no-gpu-fallback  fail if NVDLA cannot run a layer, instead of running it on the GPU
    --no-timing-cache  measure every layer again
    --verbose  show all messages of TensorRT
    @model
  $ laneDetect_model --model-repository models --fp16
  $ network.onnx --min x:1x3x360x640 --opt x:4x3x360x640 --max x:8x3x360x640

plan inspect | tools.plan:inspect_plan | show what a plan was built from and for
    --layers  its layers, which takes the device
    --json  the side-car as it is
    @model
  $ laneDetect_model
  $ laneDetect_model --layers

plan verify | tools.plan:verify_plan | compare a plan's outputs with those of its ONNX file
    --tolerance X  how far any element may be off; default: by precision
    --samples N = 4  random inputs
    @model
  $ laneDetect_model --samples 16

plan refresh | cli.plan:refresh | build each plan that is missing or does not fit this device
    --config FILE  the daemon's settings
    --model-repository DIR...  instead of the settings' repositories; repeatable
  $ --config /etc/edge_server/config.toml

convert | cli.convert:convert | make a model's directory of a file of another framework
    SRC
    DST
    --to {onnx,graphdef,openvino,plan} = onnx  what it becomes
    --from FORMAT  the format of SRC, if it cannot be recognized
    --fp16  in half precision; inputs and outputs stay FP32
    --int8  with Q/DQ nodes; needs --calibration
    --int8-operators NAMES = Conv  the ONNX operators to quantise, like Conv,Gemm
    --per-tensor  INT8: one scale for all channels of a weight
    --calibration PATH...  recorded inputs for --int8: an .npz of arrays <input> or input.<input>,
        an .npy, or a directory of them; repeatable
    --simplify  fold constants and remove operators without effect
    --version N = 1  of the model
    --max-batch COUNT  max_batch_size; default: SRC's, or 4 where the batch is open
    --labels FILE  of the first output; default: SRC's
    --input NAME:SHAPE[:TYPE]...  an input's shape, like images:-1x3x360x640:FP32, -1 for any size:
        PyTorch's files do not have it; of other sources, the sizes of random inputs; repeatable
    --outputs NAMES  names of the outputs: of TensorFlow's graphs their nodes, of Keras' and
        PyTorch's what they get
    --signature NAME  of a SavedModel; default: serving_default
    --module FILE.py:CLASS  of a PyTorch checkpoint
    --module-args VALUES  the arguments of that class, like 1,512,37, or a JSON array or object
    --module-path PLACE  directory of a pickled module's class
    --trust  SRC may run the code in it: a pickled module, Keras' Lambda layers
    --compare PATH...  recorded inputs to compare on, beside random ones; as --calibration has them
    --samples N = 4  random inputs
    --seed COUNT = 0  of the random inputs
    --limit X  the largest error, as a share of the output's largest value; default: 1e-4, with
        --fp16 1e-2, with --int8 5e-2
    --python FILE...  an interpreter that has the framework; repeatable
    --verbose  show what the frameworks print
  Converts a model file into a model's directory, complete with config.pbtxt, a version and
  labels, and placed by one rename once the result gives what the source gives.

  SRC is an ONNX file, a Keras model (.keras, .h5), a SavedModel's directory, a frozen GraphDef
  (.pb, .graphdef), a checkpoint of TensorFlow 1 (.meta), a TorchScript file, a program of
  torch.export (.pt2), a PyTorch module or checkpoint, a Paddle model, or a model's directory of a
  repository, of which the latest version is taken. DST is the directory of the new model, whose
  name the model gets.
  $ yolo.onnx models/yolo --labels names.txt
  $ net.pt models/net --input images:-1x3x360x640
  exit codes: 0 done, 1 the result differs from the source by more than is allowed, 2 usage, 69 a
  framework is not installed, 78 SRC, DST or a flag cannot be used; the text says why, 130
  interrupted; nothing is written unless the code is 0
  ! edge-server: interrupted; nothing is written

infer | cli.infer:run_infer | send one request to a model, with a picture or arrays
    MODEL
    |--image URI  a picture, or the first frame of any source that a camera can have
    |--input NAME=FILE...  an input: an array that numpy.save wrote (.npy), the batch dimension
        may be left out; or the bytes of any other file, such as a JPEG; repeatable
    --save RESULT  the picture with its lanes (.png, .jpg), or all outputs (.npz)
    --classes N  print the N best classes of each output
    --model-version VERSION  default: the latest
    --json  one object, with all numbers
    @config
    @address
  Sends one request to a model of the running daemon, over gRPC, and prints the outputs. A picture
  goes through the daemon's own preprocessing: where MODEL takes none, through the steps before it
  in the ensemble that it is a member of. Lanes are drawn into the picture.
  $ lane_detection --image road.jpg --save lanes.png
  $ laneDetect_model --image 'synthetic://road?seed=7'
  $ classifier --image cat.png --classes 3
  $ my_model --input x=x.npy --input mask=mask.npy --save outputs.npz
  $ my_ensemble --input input_image=img1.jpg
  $ my_model --input x=x.npy --json | jq '.outputs[0].shape'
  exit codes: 0 done, 1 the model failed, or there is no such model, 2 usage, 69 the daemon, the
  model or a file cannot be reached, 78 the model takes no such request, 130 interrupted

bench | cli.bench:run_bench | measure how fast a model is, also with other settings
    MODEL
    --concurrency N,… = 1,2,4  requests at a time, like 1,2,4 or 1:4
    --batch N = 1  elements of a request
    --image URI = synthetic://road?seed=7  a picture; by default a drawn road
    --seconds S = 5  of each measurement, after a first request
    --json  one object
    sweep:
    --sweep  measure other settings of the model
    --instances N,… = 1,2
    --delays US,… = 0,1000  of a batch, where the model batches, in microseconds
    --model-repository DIR...  default: as the settings have it; the shipped models without a
        settings file
    @config
    @address
  Measures a model of the running daemon over gRPC: percentiles of the latency, throughput by the
  number of requests at a time, and where the time goes in the server. The model takes pictures, or
  is in an ensemble that does: it gets one through the real preprocessing. For other models, loads
  and protocols use perf_analyzer.

  --sweep starts a daemon of its own on the same model files, loads the model there with other
  instance counts and batching delays, and measures each; the running daemon and the
  repository stay as they are. Stop the running daemon first: both would share the processors and
  the GPU.
  $ lane_detection
  $ laneDetect_model --concurrency 1:4 --json > bench.json
  $ laneDetect_model --sweep --instances 1,2
  exit codes: 0 done, 1 no request succeeded, or there is no such model, 2 usage, 69 the daemon,
  the model or a file cannot be reached, 78 the model takes no such request, 130 interrupted

cameras | | list cameras, and test one
  The cameras of this machine. These verbs do not need the daemon; a camera that the daemon reads
  may be busy.
  exit codes: 0 done, 2 usage, 69 the camera gives no images now, or the picture cannot be
  written, 78 the URI or the credentials are wrong and stay so, 130 interrupted

cameras list | cli.cameras:plugged_in | list the cameras that are plugged in, and what can read them
    --json  one object, with every mode
  $ --json

cameras probe | cli.cameras:probe | open a camera, read it for some seconds, and report on it
    URI  /dev/video0, rtsp://HOST/PATH, http://HOST/PATH, csi://0, gst:PIPELINE or a file
    --seconds S = 5
    --picture IMAGE  write the last image: .png or .jpg
    --reader {auto,gstreamer,opencv} = auto  GStreamer, if any
    --credentials FILE  user name and password, kept out of the list of processes
    --json  one object instead of lines
  $ /dev/video0 --picture seen.png
  $ rtsp://10.0.0.20/main --credentials camera.login --seconds 30

recordings | | inspect recordings, and export their pictures
  The recorder's files, in MCAP, which Foxglove opens. A camera mcap:///FILE plays one. These verbs
  do not need the daemon, and change no recording.
  exit codes: 0 done, 2 usage, 69 a file cannot be read or written, 78 a library is missing, 130
  interrupted

recordings list | cli.cameras:listed | list the recorder's files, the newest first
    [FOLDER]  default: that of the settings
    @config
  $ --config /etc/edge_server/config.toml

recordings info | cli.cameras:info | show the content of a recording, and whether it is complete
    FILE
  $ drive.mcap

recordings export | cli.cameras:export | export the pictures of one camera as JPEGs
    FILE
    FOLDER  created if it is missing
    --camera NAME  required if there are several
  $ drive.mcap pictures --camera front

power | | set a Jetson's power mode and clocks
  Sets the power mode (nvpmodel) and the clocks (jetson_clocks) of a Jetson to those of [power] in
  the settings. Requires root; edge-server-power.service runs it at boot.
  exit codes: 0 set, or nothing to set, 2 usage, 69 nvpmodel or jetson_clocks is missing or fails,
  or the mode needs a reboot, 78 the settings are wrong or the board has no such mode

power apply | cli.power:apply | set the power mode and the clocks of the settings
    --config FILE  the daemon's settings
  $ --config /etc/edge_server/config.toml

calibrate | | put a camera's lanes on the road, in metres
  Makes the file that puts a camera's lanes on the road: first its lens (intrinsics, or roughly:
  lens), then its position in the vehicle (mounting, or estimate while driving), then a picture to
  check the result (show). cameras.NAME.calibration in the settings names the file.
  exit codes: 0 done, 2 usage, 69 a camera or a picture gives nothing, or a file cannot be
  written, 78 the pictures, numbers or the file do not make a calibration; the text says why, 130
  interrupted
  ! edge-server: interrupted; no file was changed

calibrate lens | tools.calibrate:lens | estimate the lens roughly, from its field of view
    FILE  the calibration to write
    --fov DEG!  from the left edge to the right
    --size WxH = 1280x720  in px
  $ front.toml --fov 70 --size 1920x1080

calibrate intrinsics | tools.calibrate:intrinsics | measure the lens, from pictures of a board
    PICTURES...  images of the board
    --camera URI  take the pictures now: hold the board in view
    --views N = 20  of --camera
    --board KIND!  chessboard:9x6:0.025 (inner corners, metres) or
        charuco:11x8:0.03:0.022:DICT_5X5_100 (squares, square and marker in metres; :legacy for
        boards of before OpenCV 4.6)
    --lens {pinhole,fisheye} = pinhole
    --output FILE!  the calibration to write
    --residuals PNG  picture of the errors; default: beside FILE
  $ board/1.png board/2.png --board chessboard:9x6:0.025 --output front.toml
  $ --camera /dev/video0 --board charuco:11x8:0.03:0.022:DICT_5X5_100 --output front.toml

calibrate mounting | tools.calibrate:mounting | set the camera's position, or measure it from marks
    FILE  the calibration, with its lens
    --height METRES  of the lens above the road
    --pitch DEG  positive looks down; default: 0
    --yaw DEG  positive looks left; default: 0
    --picture PICTURE  of marks on the ground
    --mark U,V=X,Y...  a mark on the ground: its pixel, and metres forward and left of the front
        axle's middle; 4 or more, not in one line
    --board KIND  like chessboard:9x6:0.1, that lies flat in --picture, its columns across the
        road
    --at X,Y  of the board's nearest inner corner on the left, metres, as for --mark
    @mounting
  $ front.toml --height 1.4 --pitch 3
  $ front.toml --picture marks.png --board chessboard:9x6:0.1 --at 6.0,0.9

calibrate estimate | tools.calibrate:estimate | estimate a camera's direction on a straight drive
    FILE  the calibration, with its lens
    URI  a clip of the drive, or the camera on the vehicle
    --frames N = 1500  end after N
    --lane-width METRES = 3.6  of the lanes driven on, from which the height follows; with --height
        it is a check
    --height METRES  of the lens above the road
    --write  put the mounting into the file
    @mounting
    @lane-model
  $ front.toml drive.mp4 --height 1.4 --write

calibrate show | tools.calibrate:show | draw a grid on the road and a bird's-eye view to check
    FILE  the calibration
    URI  a picture, a clip or a camera
    --output PNG!  the picture to write
    --frame COUNT = 0  of a clip
    --lanes  detect lanes, draw them, print their numbers
    @lane-model
  $ front.toml drive.mp4 --lanes --output check.png

doctor | cli.doctor:doctor | show what is wrong with this machine, with remedies
    --json  one object, with all facts found
    --matrix  only print the versions of each JetPack, and where NVDLA can be used
    @config
  Checks the board, its JetPack, GPU and NVDLA, cameras, libraries, settings and services. Each line
  is a finding with its remedy. Changes nothing. Drivers and libraries are tried in separate
  processes: one that crashes or hangs affects only its own line.
  $ --config /etc/edge_server/config.toml --json
  $ --matrix
  exit codes: 0 no fault (warnings there may be), 1 at least one fault, 2 usage

support-bundle | cli.support_bundle:make_bundle | collect an archive for a vendor, without secrets
    -o, --output FILE  default: edge-server-support-DEVICE-TIME.tar.gz in this directory
    --anonymous  without the names of device and host
    @config
  Collects settings, versions, doctor's findings, models, metrics, logs, plans and the board's
  state in one archive, without passwords, keys and tokens. The daemon need not run. Run it as root
  to include the unit's journal and the files of its user.
  $ -o bundle.tar.gz
  $ --anonymous

health | cli.health:health | check whether the daemon serves what is required
    --require WHAT...  model:NAME is READY, camera:NAME delivers frames, lanes:NAME has valid
        lanes, or mqtt is connected; repeatable
    --wait S = 0  keep checking for S seconds
    --stable S  of --wait, how long it must stay healthy; default: 10, or all of --wait
    --lanes-within S = 2  greatest age of the lanes of lanes:NAME
    --json  one object with every requirement
    @config
  Checks the running daemon: it is ready on gRPC, has the installed version, and serves what each
  --require names. With --wait it checks again until all of that has held for --stable seconds
  without a restart. It reads the metrics endpoint, so [metrics] must be on.
  $ --wait 120 --require model:lane_detection --require camera:front --require mqtt
  exit codes: 0 healthy, 2 usage, 69 not healthy (in time), 78 the settings are wrong

status | cli.status:print_status | show what the daemon does now
    --json  one object
    @config
    @address
  Shows what the daemon on this machine does: models with their states and reasons, cameras,
  lanes, the broker, the board, plans, the recorder, and whether settings wait for a restart.
  Rates and times cover one second. Changes nothing, and needs only the rights of a client.
  $ --json | jq '.models[] | select(.state != "READY")'
  $ --grpc 127.0.0.1:18001 --metrics 127.0.0.1:18002
  exit codes: 0 the daemon responds, whatever its state (`edge-server health` judges that), 2
  usage, 69 it does not respond, 78 the settings are wrong, 130 interrupted

top | cli.status:run_top | show the same repeatedly
    --interval S = 2
    --count N  end after N times
    --json  one object on a line each time
    @config
    @address
  Shows what `status` shows, repeatedly, until Ctrl-C. Without a terminal it prints once in each
  interval. If the daemon stops, it waits for it. Over ssh it needs a terminal: ssh -t.
  $ --interval 1
  $ --count 60 --json > minute.jsonl
  exit codes: 0 ended as requested, 2 usage, 69 the daemon did not respond at the start, 78 the
  settings are wrong

update | | manage the slots, trial and verdict of an image update
  Chooses the slot that boots, judges the system that booted, shows the last update.
  exit codes: 0 done, 2 usage, 69 not healthy, or the firmware refuses, 78 this board has no
  slots, or the settings are wrong
  ! interrupted: nothing was decided

update status | cli.update:show | print the result of the last update
    --json  one object
    @state
  $ --json

update commit | cli.update:commit | keep the running system if it is healthy; see health
    --config FILE = /etc/edge_server/config.toml  the settings
    --require WHAT...  as of health; repeatable
    --wait S = 300  as of health
    --stable S = 60  as of health
    @state
    @root
  $ --require lanes:front --wait 300 --stable 60

update slot | cli.update:slot | show or change the firmware's slots, as RAUC's backend
    ACTION
    [SLOT]
    [STATE]
    --engine NAME = rauc  of who calls
    @state
    @root
  $ get-current
  $ set-primary B
  $ set-state A good

update record | cli.update:record | record the result of an update without slots
    OUTCOME
    --engine NAME!  of who updates
    --result TEXT  one sentence for people
    @state
  $ committed --engine mender --result 'release 2.1 is kept'

provision | cli.provision:provision | set id, broker and keys from a file
    FILE  the provisioning file
    --config PATH = /etc/edge_server/config.toml  the daemon's settings, which are changed
    --data PATH = /data  the data partition
    --key PATH = /usr/lib/edge-server-image/provision.pem  the Ed25519 key that must have signed
        the file, where this exists
    --replace  also if the device is provisioned already
  Applies a provisioning file to this device: its id, broker, ssh keys, Wi-Fi and cameras. The
  resulting settings are checked before anything changes.

  A file is applied once. Without a key in the image only the first file is accepted, from anyone
  who can plug in a stick; --replace is for a user who is logged in. With a key only files that it
  signed are accepted, and after the first one only files with a greater serial in [file].
  $ /media/stick/edge_server.toml
  exit codes: 0 applied, now or before, 69 the device's files cannot be written, 78 refused: the
  text says why

completion | cli.main:print_completion | print a script that completes edge-server in a shell
    SHELL
  The script completes verbs, flags and the names of files. The Debian package installs it for
  each shell. To try one: source <(edge-server completion bash)
  $ bash > ~/.local/share/bash-completion/completions/edge-server
  $ zsh > "${fpath[1]}/_edge-server"
  $ fish > ~/.config/fish/completions/edge-server.fish
  exit codes: 0 done, 2 usage

demo | cli.run:demo | show lanes arriving, with no camera or broker needed
    --source URI = synthetic://road?seed=7&fps=25  a video, an image, a folder of images,
        /dev/video0, rtsp://HOST/PATH, http://HOST/PATH, csi://0 or gst:PIPELINE
    --frames N  end after N frames
    --mqtt HOST[:PORT]  also publish on that broker
    --calibration FILE  of edge-server calibrate: lanes in metres, tracked
    --lockstep  play a recording once, and process each of its frames, as fast as that goes
    --video FILE  write what is published, drawn into the frames, as .mp4 or .avi; a recording is
        played as with --lockstep, unless its URI has a rate (fps)
    --network MODEL...  also run this model on the frames; `vehicles` and `drivable_area` are in
        examples/networks of a checkout; repeatable
    --json  one JSON object per frame
    --serve [PORT=8000]  continue until Ctrl-C, with the page at this port (8000)
    --model-repository DIR...  models in Triton's layout, instead of the shipped ones; repeatable
  $ --frames 100
  $ --source road.mp4 --json
  $ --network vehicles --video vehicles.mp4
  $ --source rtsp://10.0.0.20/main --mqtt 10.0.0.2:1883

@waiting
    --wait  fail if no daemon follows REPO; by default the verb waits only for one that does, until
        it serves the model, refuses it or rolls it back
    --no-wait  do not wait for a daemon
    --until-passed  as --wait, and until its canary has passed too, which takes requests
    --wait-secs S = 300  how long; building a plan takes minutes

@store
    --store DIR  directory of the daemon's copies of models, verdicts and quarantine; default: the
        installed daemon's, otherwise yours

@ssh
    --ssh COMMAND = ssh  like 'ssh -p 2222 -i KEY'

@keys
    --key PUB...  public key to check signatures with, which `verify` then requires; repeatable

@model
    MODEL  a name, a directory, or an ONNX file
    --model-repository DIR...  where names are looked for; repeatable; default: models
    --config FILE  or the repositories of these settings
    --version N  default: the latest

@config
    --config FILE  the daemon's settings; default: /etc/edge_server/config.toml, where it is there

@address
    --grpc ADDRESS  HOST:PORT, or the path of a Unix socket; default: that of the settings
    --metrics HOST:PORT  likewise of its metrics; default: 127.0.0.1:8002

@mounting
    --roll DEG  positive: right side lower; default: 0
    --x METRES  lens forward of the front axle; default: 0
    --y METRES  lens left of the middle; default: 0

@lane-model
    --model-repository DIR...  where the lane model is; default: the shipped models
    --model NAME = lane_detection

@state
    --state-directory DIR = /var/lib/edge_server  with the record of updates, on the data partition

@root
    --root DIR = /  above sys and dev; tests
"""
