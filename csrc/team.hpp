// SPDX-License-Identifier: Apache-2.0
// A few threads that lend a hand to whoever has work that can be shared.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace kvgrpc {

// `size` counts the caller: a team of 1 has no threads of its own. Callers always work themselves, so work never waits
// for a free hand. Threads start with the first work and end with the team; no signal is delivered to them but faults.
//
// Threads: any number may call `run` at once. Destruction when none does.
class Team {
  public:
    explicit Team(unsigned size);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    unsigned size() const noexcept { return size_; }

    // Runs `work` in the caller and in up to `hands` threads beside it, at once. Returns when nobody is in it any more.
    // `work` must not throw, and must end soon for everybody once it has ended for one.
    void run(const std::function<void()>& work, unsigned hands);

  private:
    struct Call {
        const std::function<void()>* work;
        unsigned wanted;
        unsigned busy = 0;
        std::condition_variable ended;
    };

    void start_threads();
    void serve();

    const unsigned size_;
    std::mutex mutex_;  // guards everything below
    std::condition_variable called_;
    std::deque<Call*> calls_;  // those that want more hands
    std::vector<std::thread> threads_;
    bool started_ = false;
    bool closing_ = false;
};

}  // namespace kvgrpc
