// SPDX-License-Identifier: Apache-2.0
// Turns a SIGBUS of a guarded copy into a result. Memory of an engine can be truncated while it is copied, and memory
// can break; the thread that touches it gets a signal whose default is the end of the process.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <cstdint>

namespace kvgrpc {

enum class BusFault : int { none, engine, other };  // other: the arena's memory, or memory that broke

// Guards the thread that made it, until its end. Guards of one thread nest.
//
//     BusGuard guard;
//     if (sigsetjmp(guard.jump, 0) == 0) {
//         guard.watch(engine, arena, length);
//         ... touch [engine, engine + length) and [arena, arena + length) ...
//     }
//     guard.fault()
//
// Between sigsetjmp and the touch there must be no object with a destructor that matters.
class BusGuard {
  public:
    // Puts the handler of SIGBUS in place, or back in place. Faults that no guard covers go to the handler that was
    // there before. Any thread; call before guarding. Throws std::system_error.
    static void install();

    BusGuard() noexcept;
    ~BusGuard();
    BusGuard(const BusGuard&) = delete;
    BusGuard& operator=(const BusGuard&) = delete;

    // The two ranges that are touched from here on, widened to pages.
    void watch(const void* engine, const void* arena, std::size_t length) noexcept {
        engine_ = reinterpret_cast<std::uintptr_t>(engine);
        arena_ = reinterpret_cast<std::uintptr_t>(arena);
        length_ = length;
    }

    BusFault fault() const noexcept { return fault_; }

    // For the handler: notes the fault and tells whether it is this guard's.
    bool takes(std::uintptr_t address, int code) noexcept;

    sigjmp_buf jump;

  private:
    BusGuard* outer_;
    // Read by the handler in the same thread, at any instruction.
    volatile std::uintptr_t engine_ = 0;
    volatile std::uintptr_t arena_ = 0;
    volatile std::size_t length_ = 0;
    volatile BusFault fault_ = BusFault::none;
};

}  // namespace kvgrpc
