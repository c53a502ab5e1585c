// The envelope of MQTT messages of lanes and events, and its checker: docs/mqtt.md describes it.
//
// It finds faults of software and network: repetition, loss, delay, insertion, masquerade, wrong
// sequence and corruption. It keeps nobody out: whoever may publish can compute a CRC.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

namespace edge_lanes {

// The MQTT 5 user property that is the envelope.
inline constexpr std::string_view kEnvelopeProperty = "e2e";

// What a receiver may think of a message, or of silence.
enum class Check {
  kOk,             // The next message of the topic, or the first.
  kOkSomeLost,     // Good, and messages before it are missing, at most `max_lost`.
  kRepeated,       // The message that came before it, again.
  kWrongSequence,  // Out of order, of a session that has ended, or more than `max_lost` are missing.
  kCorrupt,        // Payload, topic or envelope are not what was sent.
  kTimeout,        // It is late; or nothing good came in time.
  kInvalid,        // The message has no envelope, or none of this version.
};

// Whether the payload may be used.
inline bool Usable(Check check) { return check == Check::kOk || check == Check::kOkSomeLost; }

// Checks the messages of one topic, in the order of their arrival.
//
// A message is late where it took `max_delay` longer than the quickest one of the session, so the
// clocks of sender and receiver need not agree.
class Checker {
 public:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;

  // `topic` is the one that the receiver has subscribed to, not one that the message names.
  // Silence for longer than `timeout` is kTimeout.
  explicit Checker(std::string topic, std::uint32_t max_lost = 5, Seconds max_delay = Seconds(1),
                   Seconds timeout = Seconds(1));

  // What the message is worth; `envelope` is its user property `e2e`, or nothing where it has none.
  Check Examine(std::string_view payload, std::optional<std::string_view> envelope,
                Clock::time_point now = Clock::now());

  // kTimeout where the last good message is older than `timeout`, or none came.
  Check Silence(Clock::time_point now = Clock::now()) const;

 private:
  struct Envelope {
    std::string session;
    std::uint32_t counter;
    Seconds sent;
  };

  Check Sequence(const Envelope& envelope);
  bool Late(const Envelope& envelope, Clock::time_point now);

  const std::string topic_;
  const std::uint32_t max_lost_;
  const Seconds max_delay_, timeout_;
  std::optional<Envelope> last_;
  std::deque<std::string> ended_;
  Seconds quickest_{0};
  std::optional<Clock::time_point> arrived_, good_;
};

}  // namespace edge_lanes
