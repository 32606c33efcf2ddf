// SPDX-License-Identifier: Apache-2.0
// A CUDA driver without a card, for tests: libcuda.so.1 by name. Memory of the "card" lies in files under /dev/shm, so
// that other processes open it by handle; each stream is a thread that dawdles, so that who does not wait sees it.
//
// As the real one: a copy may not cross two registered parts of host memory, nor two allocations, which follow each other
// without a gap; a handle opens at its allocation's base, and memory that came from elsewhere has none. FAKE_CARDS says
// how many cards there are, FAKE_TAKEN_CARD which of them another process has for itself. FAKE_FAIL_FILE: while this file
// is there, every copy fails, and so does everything after the first thing that does; of FAKE_FAIL_CARD only, if given.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>

namespace {

using Pointer = std::uint64_t;
constexpr int invalid = 1, unavailable = 46, no_device = 100, lost = 700, pending = 600;

struct Area {
    std::size_t size;
    std::string name;  // of a file; empty for host memory
    int card;
    int users;
};

std::mutex mutex;
std::map<Pointer, Area> device;
std::map<Pointer, std::size_t> host;
std::atomic<bool> broken{false};
std::atomic<int> serial{0};
thread_local std::deque<std::intptr_t> contexts;

int cards() {
    const char* text = std::getenv("FAKE_CARDS");
    return text != nullptr ? std::atoi(text) : 1;
}

int state() {
    const char* file = std::getenv("FAKE_FAIL_FILE");
    if (file != nullptr && access(file, F_OK) == 0) broken = true;
    const char* only = std::getenv("FAKE_FAIL_CARD");
    const bool here = only == nullptr || (!contexts.empty() && contexts.back() == std::atoi(only) + 1);
    return broken && here ? lost : 0;
}

template <typename Map>
bool inside(const Map& map, Pointer at, std::size_t size, const std::function<std::size_t(const typename Map::mapped_type&)>& of) {
    auto found = map.upper_bound(at);
    if (found == map.begin()) return false;
    --found;
    return at + size <= found->first + of(found->second);
}

bool reachable(Pointer at, std::size_t size) {
    const std::lock_guard lock(mutex);
    return inside(device, at, size, [](const Area& area) { return area.size; }) ||
           inside(host, at, size, [](const std::size_t& length) { return length; });
}

std::atomic<bool> busy{false};
std::atomic<int> waiting{0}, stuck{0};

// What the real one may be busy with, here until somebody says that it is not.
void when_idle() {
    ++waiting;
    for (int looks = 0; busy && looks < 3000; ++looks) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (busy) ++stuck;
    --waiting;
}

// Of an event that other processes open, in a file that all of them map.
struct Counts {
    std::atomic<std::uint64_t> recorded{0}, done{0};
};

struct FakeEvent {
    std::mutex mutex;
    std::condition_variable changed;
    Counts own;
    Counts* counts = &own;
    std::string name;  // of the file
    bool opened = false;
};

class FakeStream {
  public:
    FakeStream() : thread_([this] { run(); }) {}
    ~FakeStream() {
        put([this] { over_ = true; });
        thread_.join();
    }
    void put(std::function<void()> work) {
        const std::lock_guard lock(mutex_);
        queue_.push_back(std::move(work));
        changed_.notify_all();
    }
    void drain() {
        std::mutex done;
        std::condition_variable changed;
        bool ended = false;
        put([&] {
            const std::lock_guard lock(done);
            ended = true;
            changed.notify_all();
        });
        std::unique_lock lock(done);
        changed.wait(lock, [&] { return ended; });
    }

  private:
    void run() {
        while (!over_) {
            std::function<void()> work;
            {
                std::unique_lock lock(mutex_);
                changed_.wait(lock, [this] { return !queue_.empty(); });
                work = std::move(queue_.front());
                queue_.pop_front();
            }
            std::this_thread::sleep_for(std::chrono::microseconds(30));
            work();
        }
    }
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> queue_;
    bool over_ = false;
    std::thread thread_;
};

std::atomic<int> good_copies{-1};  // until one is refused; negative: all
std::atomic<bool> out_of_memory{false};

int copy(Pointer target, Pointer source, std::size_t size, FakeStream* stream) {
    if (state() != 0) return state();
    if (good_copies >= 0 && good_copies-- == 0) {
        if (out_of_memory) throw std::bad_alloc();
        return invalid;
    }
    if (!reachable(target, size) || !reachable(source, size)) return invalid;
    stream->put([=] { std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), size); });
    return 0;
}

// Maps the card's memory behind all that was mapped before.
void* placed(std::size_t size, int fd) {
    constexpr std::size_t room = std::size_t{1} << 42, page = 4096;
    static std::atomic<Pointer> next{
        reinterpret_cast<Pointer>(mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))};
    void* at = reinterpret_cast<void*>(next.fetch_add((size + page - 1) / page * page));
    return mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
}

std::string path_of(const std::string& name) { return "/dev/shm/" + name; }

}  // namespace

extern "C" {

int cuInit(unsigned) { return cards() == 0 ? no_device : 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuGetErrorName(int error, const char** name) {
    static const std::map<int, const char*> names{{invalid, "CUDA_ERROR_INVALID_VALUE"},
                                                  {unavailable, "CUDA_ERROR_DEVICE_UNAVAILABLE"},
                                                  {no_device, "CUDA_ERROR_NO_DEVICE"},
                                                  {lost, "CUDA_ERROR_ILLEGAL_ADDRESS"}};
    const auto found = names.find(error);
    return *name = found != names.end() ? found->second : "CUDA_ERROR", 0;
}
int cuGetErrorString(int, const char** text) { return *text = "the fake driver says so", 0; }
int cuDeviceGetCount(int* count) { return *count = cards(), 0; }
int cuDeviceGetName(char* name, int size, int) { return std::snprintf(name, static_cast<std::size_t>(size), "Fake card"), 0; }
int cuDeviceGetPCIBusId(char* id, int size, int card) { return std::snprintf(id, static_cast<std::size_t>(size), "0000:%02x:00.0", card), 0; }
int cuDeviceGetUuid_v2(char* uuid, int card) { return std::memset(uuid, 0xa0 + card, 16), 0; }
int cuDeviceGetAttribute(int* value, int, int) { return *value = 0, 0; }
int cuDevicePrimaryCtxRetain(void** context, int card) {
    const char* taken = std::getenv("FAKE_TAKEN_CARD");
    if (taken != nullptr && std::atoi(taken) == card) return unavailable;
    return *context = reinterpret_cast<void*>(std::intptr_t{card} + 1), 0;
}
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxPushCurrent_v2(void* context) { return contexts.push_back(reinterpret_cast<std::intptr_t>(context)), 0; }
int cuCtxPopCurrent_v2(void** context) {
    *context = reinterpret_cast<void*>(contexts.back());
    contexts.pop_back();
    return 0;
}
int cuCtxSetCurrent(void* context) {
    contexts.clear();
    if (context != nullptr) contexts.push_back(reinterpret_cast<std::intptr_t>(context));
    return 0;
}
int cuCtxGetCurrent(void** context) {
    *context = contexts.empty() ? nullptr : reinterpret_cast<void*>(contexts.back());
    return 0;
}
int cuCtxSynchronize() { return 0; }
int cuMemsetD32_v2(Pointer pointer, std::uint32_t word, std::size_t count) {
    for (auto* at = reinterpret_cast<std::uint32_t*>(pointer); count-- > 0; ++at) *at = word;
    return 0;
}
int cuMemGetInfo_v2(std::size_t* unused, std::size_t* all) { return *unused = *all = std::size_t{1} << 33, state(); }

int cuMemAlloc_v2(Pointer* pointer, std::size_t size) {
    const std::string name = "kvgrpc-fake-" + std::to_string(getpid()) + "-" + std::to_string(serial++);
    // Not O_EXCL: whoever had this process id before and was killed has left its memory behind.
    const int fd = open(path_of(name).c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(size)) != 0) return 2;
    void* at = placed(size, fd);
    close(fd);
    *pointer = reinterpret_cast<Pointer>(at);
    const std::lock_guard lock(mutex);
    device[*pointer] = {size, name, contexts.empty() ? 0 : static_cast<int>(contexts.back() - 1), 1};
    return 0;
}
int cuMemFree_v2(Pointer pointer) {
    const std::lock_guard lock(mutex);
    const auto found = device.find(pointer);
    if (found == device.end()) return invalid;
    unlink(path_of(found->second.name).c_str());
    munmap(reinterpret_cast<void*>(pointer), found->second.size);
    device.erase(found);
    return 0;
}
std::atomic<int> host_allocations{0};
int fakeHostAllocations() { return host_allocations; }  // so far
int cuMemHostAlloc(void** at, std::size_t size, unsigned) {
    ++host_allocations;
    *at = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    const std::lock_guard lock(mutex);
    host[reinterpret_cast<Pointer>(*at)] = size;
    return 0;
}
int cuMemFreeHost(void* at) {
    const std::lock_guard lock(mutex);
    host.erase(reinterpret_cast<Pointer>(at));
    std::free(at);
    return 0;
}
int cuMemHostRegister_v2(void* at, std::size_t size, unsigned) {
    if (std::getenv("FAKE_NO_PIN") != nullptr) return 2;
    if (state() != 0) return state();
    const std::lock_guard lock(mutex);
    return host.emplace(reinterpret_cast<Pointer>(at), size).second ? 0 : 712;
}
int cuMemHostUnregister(void* at) {
    const std::lock_guard lock(mutex);
    return host.erase(reinterpret_cast<Pointer>(at)) != 0 ? 0 : 713;
}
int cuMemGetAddressRange_v2(Pointer* base, std::size_t* size, Pointer pointer) {
    const std::lock_guard lock(mutex);
    auto found = device.upper_bound(pointer);
    if (found == device.begin()) return invalid;
    --found;
    if (pointer >= found->first + found->second.size) return invalid;
    *base = found->first;
    *size = found->second.size;
    return 0;
}
int cuPointerGetAttribute(void* value, int which, Pointer pointer) {
    Pointer base = 0;
    std::size_t size = 0;
    if (cuMemGetAddressRange_v2(&base, &size, pointer) != 0) return invalid;
    const std::lock_guard lock(mutex);
    const int card = device[base].card;
    if (which == 1) *static_cast<void**>(value) = reinterpret_cast<void*>(std::intptr_t{card} + 1);
    else if (which == 2) *static_cast<int*>(value) = 2;
    else if (which == 9) *static_cast<int*>(value) = card;
    else *static_cast<std::uint32_t*>(value) = 0;
    return 0;
}
int cuIpcGetMemHandle(char* handle, Pointer pointer) {
    const std::lock_guard lock(mutex);
    const auto found = device.find(pointer);
    if (found == device.end()) return invalid;
    std::memset(handle, 0, 64);
    std::strncpy(handle, found->second.name.c_str(), 63);
    return 0;
}
struct Handle {
    char bytes[64];
};
int cuIpcOpenMemHandle_v2(Pointer* pointer, Handle handle, unsigned) {
    when_idle();
    if (state() != 0) return state();
    handle.bytes[63] = 0;
    const std::string name = handle.bytes;
    if (name.rfind("kvgrpc-fake-", 0) != 0 || name.find('/') != std::string::npos) return invalid;
    {
        const std::lock_guard lock(mutex);
        for (const auto& [at, area] : device) {
            if (area.name == "open " + name) return 208;  // already mapped: whoever opens twice did not count
        }
    }
    const int fd = open(path_of(name).c_str(), O_RDWR);
    struct stat found = {};
    if (fd < 0 || fstat(fd, &found) != 0) return invalid;
    const auto size = static_cast<std::size_t>(found.st_size);
    void* at = placed(size, fd);
    close(fd);
    *pointer = reinterpret_cast<Pointer>(at);
    const std::lock_guard lock(mutex);
    device[*pointer] = {size, "open " + name, static_cast<int>(contexts.back() - 1), 1};
    return 0;
}
int cuIpcCloseMemHandle(Pointer pointer) {
    when_idle();
    const std::lock_guard lock(mutex);
    const auto found = device.find(pointer);
    if (found == device.end()) return invalid;
    munmap(reinterpret_cast<void*>(pointer), found->second.size);
    device.erase(found);
    return 0;
}
int cuStreamCreate(FakeStream** stream, unsigned) { return when_idle(), *stream = new FakeStream, 0; }
int cuStreamDestroy_v2(FakeStream* stream) { return when_idle(), delete stream, 0; }
int cuStreamSynchronize(FakeStream* stream) { return stream->drain(), state(); }
int cuStreamWaitEvent(FakeStream* stream, FakeEvent* event, unsigned) {
    const std::lock_guard lock(event->mutex);
    stream->put([event, until = event->counts->recorded.load()] {
        std::unique_lock waiting(event->mutex);
        event->changed.wait(waiting, [&] { return event->counts->done >= until; });
    });
    return 0;
}
Counts* map_counts(const std::string& name, int flags) {
    const int fd = open(path_of(name).c_str(), O_RDWR | flags, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(Counts)) != 0) return nullptr;
    void* at = mmap(nullptr, sizeof(Counts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return static_cast<Counts*>(at);
}
int cuEventCreate(FakeEvent** event, unsigned flags) {
    *event = new FakeEvent;
    if ((flags & 4) == 0) return 0;
    (*event)->name = "kvgrpc-fake-" + std::to_string(getpid()) + "-" + std::to_string(serial++);
    (*event)->counts = map_counts((*event)->name, O_CREAT | O_TRUNC);
    return (*event)->counts != nullptr ? 0 : 2;
}
int cuEventDestroy_v2(FakeEvent* event) {  // but for one that was opened, streams may still look at it
    if (!event->opened) return 0;
    when_idle();
    munmap(event->counts, sizeof(Counts));
    return delete event, 0;
}
int cuIpcGetEventHandle(char* handle, FakeEvent* event) {
    if (event->name.empty()) return invalid;
    std::memset(handle, 0, 64);
    std::strncpy(handle, ("event " + event->name).c_str(), 63);
    return 0;
}
std::atomic<int> opened_events{0};
int fakeEvents() { return opened_events; }  // opened so far
int cuIpcOpenEventHandle(FakeEvent** event, Handle handle) {
    if (state() != 0) return state();
    handle.bytes[63] = 0;
    const std::string name = handle.bytes;
    if (name.rfind("event kvgrpc-fake-", 0) != 0 || name.find('/') != std::string::npos) return invalid;
    Counts* counts = map_counts(name.substr(6), 0);
    if (counts == nullptr) return invalid;
    when_idle();
    ++opened_events;
    *event = new FakeEvent;
    (*event)->counts = counts;
    (*event)->opened = true;
    return 0;
}
// From here on calls that open and close something wait until it is no longer busy, or for 3 s, which makes them stuck.
int fakeBusy(bool now) { return busy = now, 0; }
int fakeWaiting() { return waiting; }
int fakeStuck() { return stuck; }
// After so many copies one is refused, or there is no memory for it in this process, which the caller throws.
int fakeRefuse(int after, bool memory) { return out_of_memory = memory, good_copies = after, 0; }
// What comes behind on this stream waits until there is such a file.
int fakeHold(FakeStream* stream, const char* path) {
    stream->put([path = std::string(path)] {
        while (access(path.c_str(), F_OK) != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    return 0;
}
int cuEventRecord(FakeEvent* event, FakeStream* stream) {
    const std::lock_guard lock(event->mutex);
    stream->put([event, number = ++event->counts->recorded] {
        const std::lock_guard locked(event->mutex);
        event->counts->done = number;
        event->changed.notify_all();
    });
    return 0;
}
int cuEventQuery(FakeEvent* event) {
    if (state() != 0) return state();
    const std::lock_guard lock(event->mutex);
    return event->counts->done >= event->counts->recorded ? 0 : pending;
}
int cuMemcpyAsync(Pointer target, Pointer source, std::size_t size, FakeStream* stream) { return copy(target, source, size, stream); }
// CUDA_MEMCPY2D.
struct Grid {
    std::size_t source_x, source_y;
    int source_type;
    Pointer source_host, source_device, source_array;
    std::size_t source_pitch, target_x, target_y;
    int target_type;
    Pointer target_host, target_device, target_array;
    std::size_t target_pitch, width, height;
};
std::atomic<int> grids{0};
int fakeGrids() { return grids; }  // copies in two dimensions so far
int cuMemcpy2DAsync_v2(const Grid* grid, FakeStream* stream) {
    constexpr std::size_t most_pitch = (std::size_t{1} << 31) - 1;
    const auto [source, target] = std::pair(grid->source_type == 1 ? grid->source_host : grid->source_device,
                                            grid->target_type == 1 ? grid->target_host : grid->target_device);
    for (const std::size_t pitch : {grid->source_pitch, grid->target_pitch}) {
        if (pitch < grid->width || pitch > most_pitch) return invalid;
    }
    if (!reachable(source, (grid->height - 1) * grid->source_pitch + grid->width)) return invalid;
    if (!reachable(target, (grid->height - 1) * grid->target_pitch + grid->width)) return invalid;
    ++grids;
    for (std::size_t row = grid->height; row-- > 0;) {
        const int result = copy(target + row * grid->target_pitch, source + row * grid->source_pitch, grid->width, stream);
        if (result != 0) return result;
    }
    return 0;
}
int cuMemcpyBatchAsync(Pointer* targets, Pointer* sources, std::size_t* sizes, std::size_t count, void*, std::size_t*, std::size_t,
                       std::size_t* failed, FakeStream* stream) {
    for (std::size_t i = count; i-- > 0;) {  // in no order that anybody may count on
        const int result = copy(targets[i], sources[i], sizes[i], stream);
        if (result != 0) return *failed = i, result;
    }
    return 0;
}
// paged_copy, the only kernel.
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, FakeStream* stream, void** parameters,
                   void**) {
    const Pointer units = *static_cast<Pointer*>(parameters[0]);
    const unsigned count = *static_cast<unsigned*>(parameters[1]);
    const bool to_engine = *static_cast<int*>(parameters[2]) != 0;
    if (state() != 0) return state();
    stream->put([=] {
        const auto* words = reinterpret_cast<const std::uint64_t*>(units);
        for (unsigned i = 0; i < count; ++i, words += 3) {
            if (!reachable(words[0], words[2]) || !reachable(words[1], words[2])) std::abort();
            auto* engine = reinterpret_cast<void*>(words[0]);
            auto* other = reinterpret_cast<void*>(words[1]);
            std::memcpy(to_engine ? engine : other, to_engine ? other : engine, words[2]);
        }
    });
    return 0;
}

}  // extern "C"
