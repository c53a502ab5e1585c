#include "edge_lanes/streams.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <fstream>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace edge_lanes {
namespace {

using std::chrono::milliseconds;

// Responses that may be on their way: with more, lanes grow old in the connection.
constexpr std::uint32_t kWindow = 2;
constexpr milliseconds kShortestWait(500), kLongestWait(5000);
// A device that lost its power closes no connection: a ping that is not answered does.
constexpr int kPingAfterMs = 10'000, kPingTimeoutMs = 5'000;

std::string WithoutPrefix(const std::string& name, const std::string& prefix) {
  return name.compare(0, prefix.size(), prefix) == 0 ? name.substr(prefix.size()) : name;
}

std::string Text(const grpc::Status& status) {
  return status.ok() ? "" : std::to_string(status.error_code()) + ": " + status.error_message();
}

// Whether another call may succeed: the daemon restarts or its streams are all taken, or a
// connection has reached its age or was slow.
bool MayPass(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::OK:
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
    case grpc::StatusCode::CANCELLED:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return true;
    default:
      return false;
  }
}

State StateOf(v1::FrameStatus status) {
  switch (status) {
    case v1::FRAME_STATUS_OK:
      return State::kOk;
    case v1::FRAME_STATUS_DEGRADED:
      return State::kDegraded;
    case v1::FRAME_STATUS_STALE:
      return State::kStale;
    default:  // one that this version does not know, too
      return State::kInvalid;
  }
}

// The stub of a channel of its own, and the metadata of its calls.
class Service {
 public:
  Service(const std::string& address, const Access& access) : token_(access.token) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kPingAfterMs);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kPingTimeoutMs);
    // What newer versions of gRPC go by.
    arguments.SetInt("grpc.http2.ping_timeout_ms", kPingTimeoutMs);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    const auto credentials =
        access.credentials ? access.credentials : grpc::InsecureChannelCredentials();
    stub_ = v1::LaneService::NewStub(grpc::CreateCustomChannel(address, credentials, arguments));
  }

  v1::LaneService::Stub& stub() { return *stub_; }
  void Prepare(grpc::ClientContext& context) const {
    if (!token_.empty()) context.AddMetadata("authorization", "Bearer " + token_);
  }

 private:
  const std::string token_;
  std::unique_ptr<v1::LaneService::Stub> stub_;
};

// The pauses between calls, each longer than the one before until a response comes.
class Pauses {
 public:
  milliseconds Next() { return std::exchange(next_, std::min(2 * next_, kLongestWait)); }
  void Reset() { next_ = kShortestWait; }

 private:
  milliseconds next_ = kShortestWait;
};

}  // namespace

const char* Name(State state) {
  switch (state) {
    case State::kOk:
      return "OK";
    case State::kDegraded:
      return "DEGRADED";
    case State::kStale:
      return "STALE";
    case State::kInvalid:
      return "INVALID";
    default:
      return "SILENT";
  }
}

std::vector<std::string> Reading::reasons() const {
  std::vector<std::string> names;
  for (const v1::Reason& each : frame.reason_details()) {
    names.push_back(WithoutPrefix(v1::ReasonCode_Name(each.code()), "REASON_CODE_"));
  }
  return names;
}

Error::Error(const grpc::Status& status) : std::runtime_error(Text(status)), status(status) {}

// Keeps a call of StreamLanes open, on a thread; responses wait for the reader.
class LaneStream::Receiver {
 public:
  Receiver(const std::string& address, const Choice& choice, const Access& access)
      : silent_after_(choice.silent_after), service_(address, access) {
    for (const std::string& camera : choice.cameras) first_.add_cameras(camera);
    first_.set_max_hz(choice.max_hz);
    first_.set_window(kWindow);
    thread_ = std::thread([this] { Receive(); });
  }

  ~Receiver() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
      if (call_) call_->context.TryCancel();
    }
    changed_.notify_all();
    thread_.join();
  }

  Reading Next() {
    if (used_.first) used_.first->Acknowledge(used_.second);
    used_ = {};
    std::unique_lock lock(mutex_);
    const auto ready = [this] { return !arrived_.empty() || failed_; };
    if (!changed_.wait_for(lock, silent_after_, ready)) {
      Reading silent;
      silent.text = Text(status_);
      return silent;
    }
    if (arrived_.empty()) throw Error(status_);
    auto [call, response] = std::move(arrived_.front());
    arrived_.pop_front();
    used_ = {std::move(call), response.sequence()};
    Reading reading;
    reading.state = StateOf(response.frame().status());
    reading.lost = response.lost();
    for (const v1::Reason& reason : response.frame().reason_details()) {
      if (!reason.text().empty()) reading.text += (reading.text.empty() ? "" : "; ") + reason.text();
    }
    reading.frame = std::move(*response.mutable_frame());
    return reading;
  }

 private:
  struct Call {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::StreamLanesRequest, v1::StreamLanesResponse>> stream;
    std::mutex writing;
    bool ended = false;

    // Does not wait for the device: at most kWindow of these small requests are on their way.
    void Acknowledge(std::uint64_t sequence) {
      v1::StreamLanesRequest request;
      request.set_acknowledged(sequence);
      const std::lock_guard lock(writing);
      if (!ended) stream->Write(request);
    }
  };

  void Receive() {
    Pauses pauses;
    for (;;) {
      const auto call = std::make_shared<Call>();
      {
        const std::lock_guard lock(mutex_);
        if (stopped_) return;
        call_ = call;
      }
      service_.Prepare(call->context);
      call->stream = service_.stub().StreamLanes(&call->context);
      call->stream->Write(first_);
      v1::StreamLanesResponse response;
      while (call->stream->Read(&response)) {
        pauses.Reset();
        const std::lock_guard lock(mutex_);
        status_ = grpc::Status::OK;
        arrived_.emplace_back(call, std::move(response));
        changed_.notify_all();
      }
      {
        const std::lock_guard lock(call->writing);
        call->ended = true;
      }
      const grpc::Status status = call->stream->Finish();
      std::unique_lock lock(mutex_);
      status_ = status;
      if (!MayPass(status)) {
        failed_ = true;
        changed_.notify_all();
        return;
      }
      if (changed_.wait_for(lock, pauses.Next(), [this] { return stopped_; })) return;
    }
  }

  const milliseconds silent_after_;
  Service service_;
  v1::StreamLanesRequest first_;
  // The response that the reader has, and its call.
  std::pair<std::shared_ptr<Call>, std::uint64_t> used_;

  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::deque<std::pair<std::shared_ptr<Call>, v1::StreamLanesResponse>> arrived_;
  std::shared_ptr<Call> call_;
  grpc::Status status_;
  bool failed_ = false;
  bool stopped_ = false;
  std::thread thread_;
};

LaneStream::LaneStream(const std::string& address, const Choice& choice, const Access& access)
    : receiver_(std::make_unique<Receiver>(address, choice, access)) {}
LaneStream::~LaneStream() = default;
Reading LaneStream::Next() { return receiver_->Next(); }

class EventStream::Call {
 public:
  Call(const std::string& address, const Access& access) : service_(address, access) {}
  ~Call() { End(); }

  // Waits for the next event after the one that `last` keeps.
  v1::Event Next(const std::filesystem::path& last) {
    for (;;) {
      if (!reader_) Begin(last);
      v1::StreamEventsResponse response;
      if (reader_->Read(&response)) {
        pauses_.Reset();
        return response.event();
      }
      const grpc::Status status = std::exchange(reader_, nullptr)->Finish();
      if (!MayPass(status)) throw Error(status);
      std::this_thread::sleep_for(pauses_.Next());
    }
  }

  std::optional<v1::Event> used;

 private:
  void Begin(const std::filesystem::path& last) {
    v1::StreamEventsRequest request;
    std::uint64_t after_id = 0;
    std::string log;
    if (std::ifstream file(last); file >> after_id) file >> log;
    request.set_after_id(after_id);
    request.set_log(log);
    context_ = std::make_unique<grpc::ClientContext>();
    service_.Prepare(*context_);
    reader_ = service_.stub().StreamEvents(context_.get(), request);
  }

  void End() {
    if (!reader_) return;
    context_->TryCancel();
    v1::StreamEventsResponse response;
    while (reader_->Read(&response)) {
    }
    reader_->Finish();
  }

  Service service_;
  Pauses pauses_;
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<grpc::ClientReader<v1::StreamEventsResponse>> reader_;
};

EventStream::EventStream(const std::string& address, std::filesystem::path last, const Access& access)
    : last_(std::move(last)), call_(std::make_unique<Call>(address, access)) {}
EventStream::~EventStream() = default;

v1::Event EventStream::Next() {
  if (call_->used) Keep(*std::exchange(call_->used, std::nullopt));
  call_->used = call_->Next(last_);
  return *call_->used;
}

void EventStream::Keep(const v1::Event& event) {
  // Replaced as a whole, so that it is never empty where the power fails.
  const std::filesystem::path made = last_.string() + ".new";
  std::ofstream file;
  file.exceptions(std::ios::failbit | std::ios::badbit);
  file.open(made);
  file << event.id() << ' ' << event.log();
  file.close();
  std::filesystem::rename(made, last_);
}

}  // namespace edge_lanes
