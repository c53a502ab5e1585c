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
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>

#include <edge_lanes/streams.h>

namespace v1 = edge_lanes::v1;

namespace {

// "CAMERA" of "EVENT_KIND_CAMERA".
std::string Word(const std::string& name, const std::string& prefix) {
  return name.compare(0, prefix.size(), prefix) == 0 ? name.substr(prefix.size()) : name;
}

// Prints the lanes of every frame, and every silence of the device.
void ShowLanes(const std::string& address, long most) {
  edge_lanes::LaneStream stream(address);
  for (long shown = 0; most == 0 || shown < most; ++shown) {
    const edge_lanes::Reading reading = stream.Next();
    if (reading.state == edge_lanes::State::kSilent) {
      std::cerr << "no lanes: " << reading.text << std::endl;
      continue;
    }
    const v1::LaneFrame& frame = reading.frame;
    char offset[16] = "-";
    if (frame.ego().has_lateral_offset_m()) {
      std::snprintf(offset, sizeof offset, "%+.2f", frame.ego().lateral_offset_m());
    }
    std::cout << frame.camera() << " " << frame.frame_id() << " " << Name(reading.state) << " "
              << frame.time().age_us() / 1000 << " ms, " << frame.lanes_size() << " lanes, offset "
              << offset << " m, lost " << reading.lost;
    for (const std::string& reason : reading.reasons()) std::cout << ", " << reason;
    std::cout << std::endl;
  }
}

// Prints every event once, across restarts of the daemon and of this program.
void ShowEvents(const std::string& address, const std::string& last, long most) {
  edge_lanes::EventStream stream(address, last);
  for (long shown = 1;; ++shown) {
    const v1::Event event = stream.Next();
    std::cout << event.id() << " " << Word(v1::EventKind_Name(event.kind()), "EVENT_KIND_") << " "
              << Word(v1::EventPhase_Name(event.phase()), "EVENT_PHASE_") << " " << event.cause()
              << " " << (event.camera().empty() ? "-" : event.camera()) << std::endl;
    if (shown == most) {
      stream.Keep(event);
      return;
    }
  }
}

// Gives the vehicle's state, as a vehicle does: the daemon uses a state for half a second.
void SendVehicleState(const std::string& address, double speed_mps, std::string indicator,
                      double seconds) {
  for (char& letter : indicator) letter = static_cast<char>(std::toupper(letter));
  v1::Indicator word;
  if (!v1::Indicator_Parse("INDICATOR_" + indicator, &word)) {
    throw std::invalid_argument("the indicator is off, left, right or hazard");
  }
  v1::SetVehicleStateRequest state;
  state.set_speed_mps(speed_mps);
  state.set_indicator(word);
  const auto service =
      v1::LaneService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (bool first = true;; first = false) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(1));
    v1::SetVehicleStateResponse response;
    const grpc::Status status = service->SetVehicleState(&context, state, &response);
    if (!status.ok()) throw edge_lanes::Error(status);
    if (first) std::cout << "taken" << std::endl;
    if (std::chrono::steady_clock::now() >= until) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto word = [&](int at, const char* otherwise) { return argc > at ? argv[at] : otherwise; };
  const std::string verb = word(2, "");
  try {
    if (verb == "lanes") {
      ShowLanes(argv[1], std::atol(word(3, "0")));
    } else if (verb == "events" && argc > 3) {
      ShowEvents(argv[1], argv[3], std::atol(word(4, "0")));
    } else if (verb == "vehicle" && argc > 3) {
      SendVehicleState(argv[1], std::atof(argv[3]), word(4, "off"), std::atof(word(5, "0")));
    } else {
      std::cerr << "usage: lanes ADDRESS lanes [COUNT] | events LAST_ID [COUNT] | "
                   "vehicle SPEED [off|left|right|hazard [SECONDS]]\n";
      return 2;
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
