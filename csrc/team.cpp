// SPDX-License-Identifier: Apache-2.0
#include "team.hpp"

#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <system_error>

namespace kvgrpc {

Team::Team(unsigned size) : size_(std::max(size, 1U)) {}

Team::~Team() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    called_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Team::run(const std::function<void()>& work, unsigned hands) {
    Call call{&work, std::min(hands, size_ - 1), 0, {}};
    if (call.wanted == 0) {
        work();
        return;
    }
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!started_) start_threads();
        calls_.push_back(&call);
    }
    for (unsigned i = 0; i < std::min(hands, size_ - 1); ++i) called_.notify_one();
    work();
    std::unique_lock<std::mutex> lock(mutex_);
    std::erase(calls_, &call);
    call.ended.wait(lock, [&] { return call.busy == 0; });
}

// With mutex_ held. Fewer threads than wanted are slower and nothing else.
void Team::start_threads() {
    started_ = true;
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    for (const int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        while (threads_.size() + 1 < size_) {
            threads_.emplace_back([this] { serve(); });
            pthread_setname_np(threads_.back().native_handle(), "kvgrpc-copy");
        }
    } catch (const std::system_error&) {
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Team::serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        called_.wait(lock, [&] { return closing_ || !calls_.empty(); });
        if (closing_) return;
        Call& call = *calls_.front();
        if (--call.wanted == 0) calls_.pop_front();
        ++call.busy;
        lock.unlock();
        (*call.work)();
        lock.lock();
        if (--call.busy == 0) call.ended.notify_one();
    }
}

}  // namespace kvgrpc
