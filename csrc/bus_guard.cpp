// SPDX-License-Identifier: Apache-2.0
#include "bus_guard.hpp"

#include <pthread.h>
#include <ucontext.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <deque>
#include <mutex>
#include <system_error>

namespace kvgrpc {
namespace {

// Thread-local variables that a handler reads must be there without an allocation, which initial-exec promises.
#define KVGRPC_HANDLER_LOCAL static thread_local __attribute__((tls_model("initial-exec")))

KVGRPC_HANDLER_LOCAL BusGuard* innermost = nullptr;
KVGRPC_HANDLER_LOCAL int passes = 0;  // foreign faults since the thread's last guard

constexpr int most_passes = 100;

std::atomic<const struct sigaction*> earlier{nullptr};

void end_by_default(const siginfo_t* info) {
    struct sigaction by_default = {};
    by_default.sa_handler = SIG_DFL;
    sigaction(SIGBUS, &by_default, nullptr);
    if (info->si_code <= 0) raise(SIGBUS);  // sent by a process: returning would not repeat it, as it repeats a fault
}

// A handler that came before may put this one back and raise or fault again, as Python's faulthandler does: what it
// raises goes to the default, and so does a thread that does nothing but fault.
void pass_on(int signal, siginfo_t* info, void* context) {
    const struct sigaction* action = earlier.load(std::memory_order_acquire);
    const bool plain = (action->sa_flags & SA_SIGINFO) == 0;
    const bool again = (passes > 0 && info->si_code <= 0) || passes >= most_passes;
    if (again || (plain && (action->sa_handler == SIG_DFL || action->sa_handler == SIG_IGN))) {
        end_by_default(info);
        return;
    }
    ++passes;
    if (plain) {
        action->sa_handler(signal);
    } else {
        action->sa_sigaction(signal, info, context);
    }
}

void on_bus_error(int signal, siginfo_t* info, void* context) {
    BusGuard* guard = innermost;
    if (guard != nullptr && guard->takes(reinterpret_cast<std::uintptr_t>(info->si_addr), info->si_code)) {
        // A jump does not restore the mask, and whoever wrapped this handler may have blocked signals for its time.
        pthread_sigmask(SIG_SETMASK, &static_cast<const ucontext_t*>(context)->uc_sigmask, nullptr);
        siglongjmp(guard->jump, 1);
    }
    const int error = errno;
    pass_on(signal, info, context);
    errno = error;
}

}  // namespace

void BusGuard::install() {
    static std::mutex mutex;
    static std::deque<struct sigaction> found;  // grows only when somebody replaces the handler; a deque never moves
    const std::lock_guard<std::mutex> lock(mutex);
    struct sigaction now = {};
    if (sigaction(SIGBUS, nullptr, &now) != 0) throw std::system_error(errno, std::generic_category(), "sigaction");
    if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_bus_error) return;
    found.push_back(now);
    earlier.store(&found.back(), std::memory_order_release);
    struct sigaction ours = {};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    if (sigaction(SIGBUS, &ours, nullptr) != 0) throw std::system_error(errno, std::generic_category(), "sigaction");
}

BusGuard::BusGuard() noexcept : outer_(innermost) {
    passes = 0;
    innermost = this;
}

BusGuard::~BusGuard() { innermost = outer_; }

bool BusGuard::takes(std::uintptr_t address, int code) noexcept {
    if (code != BUS_ADRERR && code != BUS_OBJERR && code != BUS_MCEERR_AR) return false;
    constexpr std::uintptr_t page = 4096;
    const auto covers = [&](std::uintptr_t start) {
        return length_ != 0 && address >= start / page * page && address < (start + length_ + page - 1) / page * page;
    };
    if (covers(engine_)) {
        fault_ = code == BUS_MCEERR_AR ? BusFault::other : BusFault::engine;
        return true;
    }
    if (covers(arena_)) fault_ = BusFault::other;
    return fault_ == BusFault::other;
}

}  // namespace kvgrpc
