// A vehicle program in C++: lanes as they come, events without a gap, the vehicle's speed.
//
//   lanes 127.0.0.1:8001 lanes [COUNT]             of all cameras
//   lanes 127.0.0.1:8001 events LAST_ID [COUNT]    a file that keeps the last id
//   lanes 127.0.0.1:8001 vehicle SPEED_MPS [off|left|right|hazard [SECONDS]]
//
// COUNT ends the program after so many; SECONDS has it send the state for so long, ten times a
// second. README.md says how it is built.
#include <cctype>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <thread>

#include <grpcpp/grpcpp.h>

#include "edge/lanes/v1/lane_service.grpc.pb.h"

namespace v1 = edge::lanes::v1;
using grpc::ClientContext;
using grpc::Status;
using grpc::StatusCode;

namespace {

constexpr std::uint32_t kWindow = 2;

// "FRAME_STATUS_OK" without its first words.
std::string Word(const std::string& name, const std::string& prefix) {
  return name.compare(0, prefix.size(), prefix) == 0 ? name.substr(prefix.size()) : name;
}

// Whether to connect again: the daemon restarts, or a TCP connection has reached its age.
bool MayPass(const Status& status) {
  if (status.ok() || status.error_code() == StatusCode::UNAVAILABLE ||
      status.error_code() == StatusCode::RESOURCE_EXHAUSTED) {
    std::cerr << "the stream ended: " << status.error_message() << "\n";
    return true;
  }
  std::cerr << "error " << status.error_code() << ": " << status.error_message() << "\n";
  return false;
}

// Prints the lanes of every frame until `most` are shown (0: for ever) or the stream ends.
Status ShowLanes(v1::LaneService::Stub& service, long most, long& shown) {
  ClientContext context;
  auto stream = service.StreamLanes(&context);
  v1::StreamLanesRequest request;
  request.set_window(kWindow);
  stream->Write(request);
  v1::StreamLanesResponse response;
  while (stream->Read(&response)) {
    const v1::LaneFrame& frame = response.frame();
    char offset[16] = "-";
    if (frame.ego().has_lateral_offset_m()) {
      std::snprintf(offset, sizeof offset, "%+.2f", frame.ego().lateral_offset_m());
    }
    std::string reasons;
    for (const v1::Reason& reason : frame.reason_details()) {
      reasons += ", " + Word(v1::ReasonCode_Name(reason.code()), "REASON_CODE_");
    }
    std::cout << frame.camera() << " " << frame.frame_id() << " "
              << Word(v1::FrameStatus_Name(frame.status()), "FRAME_STATUS_") << " "
              << frame.time().age_us() / 1000 << " ms, " << frame.lanes_size()
              << " lanes, offset " << offset << " m, lost " << response.lost() << reasons << std::endl;
    if (++shown == most) {
      context.TryCancel();
      break;
    }
    // Acknowledged once it is used: at most kWindow are on their way, so none grows old.
    v1::StreamLanesRequest acknowledged;
    acknowledged.set_acknowledged(response.sequence());
    if (!stream->Write(acknowledged)) break;
  }
  return stream->Finish();
}

// Prints every event once, across restarts of the daemon and of this program.
Status ShowEvents(v1::LaneService::Stub& service, const std::string& file, long most, long& shown) {
  std::uint64_t last_id = 0;
  std::ifstream(file) >> last_id;
  ClientContext context;
  v1::StreamEventsRequest request;
  request.set_after_id(last_id);
  auto stream = service.StreamEvents(&context, request);
  v1::StreamEventsResponse response;
  while (stream->Read(&response)) {
    const v1::Event& event = response.event();
    std::cout << event.id() << " " << Word(v1::EventKind_Name(event.kind()), "EVENT_KIND_") << " "
              << Word(v1::EventPhase_Name(event.phase()), "EVENT_PHASE_") << " " << event.cause()
              << " " << (event.camera().empty() ? "-" : event.camera()) << std::endl;
    // After it is dealt with: a program that dies in between sees it again. The file is replaced
    // as a whole, so that it is never an empty one where the power fails.
    std::ofstream(file + ".new") << event.id();
    std::rename((file + ".new").c_str(), file.c_str());
    if (++shown == most) {
      context.TryCancel();
      break;
    }
  }
  return stream->Finish();
}

// Gives the vehicle's state, as a vehicle does: the daemon uses a state for half a second.
int SendVehicleState(v1::LaneService::Stub& service, double speed_mps, std::string indicator,
                     double seconds) {
  for (char& letter : indicator) letter = static_cast<char>(std::toupper(letter));
  v1::Indicator word;
  if (!v1::Indicator_Parse("INDICATOR_" + indicator, &word)) {
    std::cerr << "the indicator is off, left, right or hazard\n";
    return 2;
  }
  v1::SetVehicleStateRequest state;
  state.set_speed_mps(speed_mps);
  state.set_indicator(word);
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (bool first = true;; first = false) {
    ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(1));
    v1::SetVehicleStateResponse response;
    const Status status = service.SetVehicleState(&context, state, &response);
    if (!status.ok()) {
      std::cerr << "error " << status.error_code() << ": " << status.error_message() << "\n";
      return 1;
    }
    if (first) std::cout << "taken" << std::endl;
    if (std::chrono::steady_clock::now() >= until) return 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string verb = argc > 2 ? argv[2] : "";
  if (!(verb == "lanes" || (argc > 3 && (verb == "events" || verb == "vehicle")))) {
    std::cerr << "usage: lanes ADDRESS lanes [COUNT] | events LAST_ID [COUNT] | "
                 "vehicle SPEED [off|left|right|hazard [SECONDS]]\n";
    return 2;
  }
  auto channel = grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials());
  auto service = v1::LaneService::NewStub(channel);
  if (verb == "vehicle") {
    return SendVehicleState(*service, std::atof(argv[3]), argc > 4 ? argv[4] : "off",
                            argc > 5 ? std::atof(argv[5]) : 0.0);
  }
  const int count_at = verb == "lanes" ? 3 : 4;
  const long most = argc > count_at ? std::atol(argv[count_at]) : 0;
  long shown = 0;
  for (;;) {
    const Status status = verb == "lanes" ? ShowLanes(*service, most, shown)
                                          : ShowEvents(*service, argv[3], most, shown);
    if (most && shown >= most) return 0;
    if (!MayPass(status)) return 1;
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
  }
}
