// SPDX-License-Identifier: Apache-2.0
#include "event_poll.hpp"

#include <sys/prctl.h>

#include <algorithm>

namespace kvgrpc {
namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

constexpr microseconds least_nap(20);
constexpr microseconds most_nap(1000);
constexpr int share = 16;  // naps are this share of the time that the newest has been waited for

}  // namespace

void EventPoll::add(std::uint64_t key, std::shared_ptr<IpcEvent> event) {
    const std::lock_guard lock(mutex_);
    pending_[key] = std::move(event);
    newest_ = steady_clock::now();
    changed_.notify_all();
}

void EventPoll::drop(std::uint64_t key) {
    std::shared_ptr<IpcEvent> dropped;  // ends outside of the lock
    const std::lock_guard lock(mutex_);
    const auto found = pending_.find(key);
    if (found == pending_.end()) return;
    dropped = std::move(found->second);
    pending_.erase(found);
}

std::vector<std::pair<std::uint64_t, std::string>> EventPoll::wait() {
    prctl(PR_SET_TIMERSLACK, 1UL);
    std::vector<std::pair<std::uint64_t, std::string>> over;
    std::unique_lock lock(mutex_);
    while (over.empty()) {
        changed_.wait(lock, [this] { return closed_ || !pending_.empty(); });
        if (closed_) return {};
        const std::vector<std::pair<std::uint64_t, std::shared_ptr<IpcEvent>>> asked(pending_.begin(), pending_.end());
        lock.unlock();  // the driver may take its time
        for (const auto& [key, event] : asked) {
            try {
                if (event->is_over()) over.emplace_back(key, "");
            } catch (const cuda::CudaError& error) {
                over.emplace_back(key, error.what());
            }
        }
        lock.lock();
        std::erase_if(over, [this](const auto& one) { return pending_.erase(one.first) == 0; });
        if (!over.empty()) break;
        const auto waited = std::chrono::duration_cast<microseconds>(steady_clock::now() - newest_);
        changed_.wait_for(lock, std::clamp(waited / share, least_nap, most_nap));
    }
    return over;
}

void EventPoll::close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
}

}  // namespace kvgrpc
