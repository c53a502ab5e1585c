#include "edge_lanes/e2e.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <regex>
#include <utility>

namespace edge_lanes {
namespace {

constexpr std::size_t kSessionsKept = 8;
// Clocks of two machines drift apart by less than 200 parts per million.
constexpr double kDrift = 200e-6;

constexpr std::array<std::uint32_t, 256> CrcTable() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < table.size(); ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0xedb88320u : 0);
    table[byte] = value;
  }
  return table;
}
constexpr std::array<std::uint32_t, 256> kCrcTable = CrcTable();

// The CRC-32 of IEEE 802.3, byte by byte.
class Crc32 {
 public:
  Crc32& Add(std::string_view bytes) {
    for (const char byte : bytes) {
      state_ = kCrcTable[(state_ ^ static_cast<unsigned char>(byte)) & 0xff] ^ (state_ >> 8);
    }
    return *this;
  }
  std::string Hex() const {
    char text[9];
    std::snprintf(text, sizeof text, "%08x", ~state_);
    return text;
  }

 private:
  std::uint32_t state_ = ~0u;
};

}  // namespace

Checker::Checker(std::string topic, std::uint32_t max_lost, Seconds max_delay, Seconds timeout)
    : topic_(std::move(topic)), max_lost_(max_lost), max_delay_(max_delay), timeout_(timeout) {}

Check Checker::Examine(std::string_view payload, std::optional<std::string_view> envelope,
                       Clock::time_point now) {
  static const std::regex kPattern(
      "(1 ([0-9a-f]{8}) (0|[1-9][0-9]{0,9}) (0|[1-9][0-9]{0,15})) ([0-9a-f]{8})");
  std::match_results<std::string_view::const_iterator> found;
  if (!envelope || !std::regex_match(envelope->begin(), envelope->end(), found, kPattern)) {
    return Check::kInvalid;
  }
  const std::string_view zero("\0", 1);
  const std::string crc =
      Crc32().Add(topic_).Add(zero).Add(found.str(1)).Add(zero).Add(payload).Hex();
  const std::uint64_t counter = std::stoull(found.str(3));
  if (crc != found.str(5) || counter > UINT32_MAX) return Check::kCorrupt;
  const Envelope read{found.str(2), static_cast<std::uint32_t>(counter),
                      std::chrono::milliseconds(std::stoll(found.str(4)))};
  Check check = Sequence(read);
  if (Usable(check) && Late(read, now)) check = Check::kTimeout;
  if (Usable(check)) good_ = now;
  return check;
}

Check Checker::Silence(Clock::time_point now) const {
  return good_ && now - *good_ <= timeout_ ? Check::kOk : Check::kTimeout;
}

Check Checker::Sequence(const Envelope& envelope) {
  if (!last_) {
    last_ = envelope;
    return Check::kOk;
  }
  if (envelope.session != last_->session) {
    if (std::find(ended_.begin(), ended_.end(), envelope.session) != ended_.end()) {
      return Check::kWrongSequence;
    }
    ended_.push_back(last_->session);
    if (ended_.size() > kSessionsKept) ended_.pop_front();
    last_ = envelope;
    arrived_.reset();
    return Check::kOkSomeLost;
  }
  const std::uint32_t ahead = envelope.counter - last_->counter;
  if (ahead == 0) return Check::kRepeated;
  // A counter that was left behind does not come back.
  if (ahead < 0x80000000u) last_ = envelope;
  if (ahead == 1) return Check::kOk;
  return ahead - 1 <= max_lost_ ? Check::kOkSomeLost : Check::kWrongSequence;
}

bool Checker::Late(const Envelope& envelope, Clock::time_point now) {
  const Seconds took = now.time_since_epoch() - envelope.sent;
  if (!arrived_) {
    quickest_ = took;
  } else {
    const Seconds drift = kDrift * std::max(Seconds(0), Seconds(now - *arrived_));
    quickest_ = std::min(took, quickest_ + drift);
  }
  arrived_ = now;
  return took - quickest_ > max_delay_;
}

}  // namespace edge_lanes
