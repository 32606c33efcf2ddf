// SPDX-License-Identifier: Apache-2.0
// Waits for events of other processes.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "card.hpp"

namespace kvgrpc {

// Asks for each event whether it is over, again and again. No stream of ours ever waits for one: what an engine never
// completes would hold up whoever shares a queue of the card with that stream, and nobody could take the wait back.
//
// Threads: `wait` by one, all else by any.
class EventPoll {
  public:
    void add(std::uint64_t key, std::shared_ptr<IpcEvent> event);
    // Harmless for a key that is not there.
    void drop(std::uint64_t key);
    // Blocks until events are over: their keys, each once, with what the driver said if it failed. Nothing after
    // `close`.
    std::vector<std::pair<std::uint64_t, std::string>> wait();
    void close();

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<std::uint64_t, std::shared_ptr<IpcEvent>> pending_;
    std::chrono::steady_clock::time_point newest_;
    bool closed_ = false;
};

}  // namespace kvgrpc
