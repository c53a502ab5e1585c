// Lanes and events of an edge-server device over gRPC, across restarts of the daemon.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "edge/lanes/v1/lane_service.grpc.pb.h"

namespace edge_lanes {

namespace v1 = edge::lanes::v1;

// Whether lanes may be acted upon: the frame's status, or kSilent where nothing arrives.
enum class State { kOk, kDegraded, kStale, kInvalid, kSilent };

// "OK", "DEGRADED", "STALE", "INVALID" or "SILENT".
const char* Name(State state);

// The lanes of one frame of one camera, or the silence of all cameras.
struct Reading {
  State state = State::kSilent;
  // Empty where the state is kSilent.
  v1::LaneFrame frame;
  // Frames of this camera that this stream missed since its last reading of it.
  std::uint32_t lost = 0;
  // Why the state is not kOk, for people; where it is kSilent, the last error of the connection.
  std::string text;

  // The lanes are fresh. Where the state is kDegraded, some may be missing.
  bool usable() const { return state == State::kOk || state == State::kDegraded; }
  // Why the state is not kOk, each as its code without REASON_CODE_.
  std::vector<std::string> reasons() const;
};

// A status that no other attempt passes, such as NOT_FOUND for a camera that is not in the settings,
// or UNAUTHENTICATED.
class Error : public std::runtime_error {
 public:
  explicit Error(const grpc::Status& status);
  const grpc::Status status;
};

// How a device is reached.
struct Access {
  // Of TLS; plain text where it is empty.
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  // For the scope `read`, where the device has tokens.
  std::string token;
};

// Which lanes a stream gives.
struct Choice {
  // Names of cameras; all cameras where it is empty.
  std::vector<std::string> cameras;
  // Readings of each camera in a second at most, 0 for every frame.
  float max_hz = 0;
  // A reading with State::kSilent comes after so long without another.
  std::chrono::milliseconds silent_after = std::chrono::seconds(2);
};

// The newest lanes of the chosen cameras; it connects again by itself.
//
// A reader that is slower than its cameras gets the newest frame of each, never a queue of old ones.
// One thread reads a stream.
class LaneStream {
 public:
  // `address` is HOST:PORT, or unix:PATH.
  explicit LaneStream(const std::string& address, const Choice& choice = {}, const Access& access = {});
  ~LaneStream();

  // Waits for the next reading, for `silent_after` at most. The reading before it counts as used.
  // Throws Error.
  Reading Next();

 private:
  class Receiver;
  std::unique_ptr<Receiver> receiver_;
};

// Every event once, in order, across restarts of the daemon and of this program.
class EventStream {
 public:
  // `last` is a file that keeps the last event that was dealt with; where it is missing, the stream
  // begins with the oldest event that the device keeps.
  EventStream(const std::string& address, std::filesystem::path last, const Access& access = {});
  ~EventStream();

  // Keeps that the event before was dealt with, and waits for the next one.
  // Throws Error; OUT_OF_RANGE where the device's events were erased: remove the file to begin anew.
  v1::Event Next();

  // Keeps that `event` was dealt with, before the next one is asked for. Throws where the file
  // cannot be written.
  void Keep(const v1::Event& event);

 private:
  class Call;
  std::filesystem::path last_;
  std::unique_ptr<Call> call_;
};

}  // namespace edge_lanes
