// SPDX-License-Identifier: Apache-2.0
#include "card.hpp"

#include <array>
#include <cstdio>
#include <utility>

#include "check.hpp"

namespace kvgrpc {
namespace {

using cuda::driver;

// CUpointer_attribute
constexpr int of_context = 1;
constexpr int of_memory_type = 2;
constexpr int of_managed = 8;
constexpr int of_ordinal = 9;
constexpr int of_handle_types = 14;
constexpr int of_pool = 17;

constexpr unsigned portable = 1;        // CU_MEMHOSTREGISTER_PORTABLE
constexpr unsigned lazy_peer = 1;       // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
constexpr unsigned non_blocking = 1;    // CU_STREAM_NON_BLOCKING
constexpr unsigned without_timing = 2;  // CU_EVENT_DISABLE_TIMING

std::string uuid_of(int ordinal) {
    cuda::Uuid uuid{};
    KVGRPC_CUDA(cuDeviceGetUuid_v2, &uuid, ordinal);
    std::string text = "GPU-";
    for (int i = 0; i < 16; ++i) {
        std::array<char, 3> hex{};
        std::snprintf(hex.data(), hex.size(), "%02x", static_cast<unsigned char>(uuid.bytes[i]));
        if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
        text += hex.data();
    }
    return text;
}

template <typename T>
T attribute(int which, cuda::Pointer pointer, T otherwise) {
    T value{};
    return driver().cuPointerGetAttribute(&value, which, pointer) == cuda::success ? value : otherwise;
}

class Pushed {
  public:
    explicit Pushed(cuda::Context context) { KVGRPC_CUDA(cuCtxPushCurrent_v2, context); }
    ~Pushed() {
        cuda::Context popped = nullptr;
        driver().cuCtxPopCurrent_v2(&popped);
    }
    Pushed(const Pushed&) = delete;
    Pushed& operator=(const Pushed&) = delete;
};

const char* why_not_exported(cuda::Pointer pointer) {
    if (attribute<unsigned>(of_managed, pointer, 0) != 0) return "it is managed memory: allocate it with cudaMalloc";
    if (attribute<std::uint64_t>(of_pool, pointer, 0) != 0) {
        return "it comes from a stream-ordered memory pool (cudaMallocAsync): allocate it with cudaMalloc";
    }
    if (attribute<std::uint64_t>(of_handle_types, pointer, 0) != 0) {
        return "it comes from the virtual-memory allocator: turn expandable segments (PYTORCH_CUDA_ALLOC_CONF) and "
               "sleep "
               "mode off";
    }
    return "the driver gives no handle for it; the virtual-memory allocator (expandable segments, sleep mode) is the "
           "usual reason";
}

}  // namespace

std::vector<CardFacts> list_cards() {
    int count = 0;
    KVGRPC_CUDA(cuDeviceGetCount, &count);
    std::vector<CardFacts> cards;
    for (int ordinal = 0; ordinal < count; ++ordinal) {
        std::array<char, 128> name{};
        std::array<char, 32> bus{};
        KVGRPC_CUDA(cuDeviceGetName, name.data(), name.size(), ordinal);
        KVGRPC_CUDA(cuDeviceGetPCIBusId, bus.data(), bus.size(), ordinal);
        cards.push_back({ordinal, uuid_of(ordinal), name.data(), bus.data()});
    }
    return cards;
}

cuda::Context current_context() noexcept {
    cuda::Context context = nullptr;
    try {
        if (driver().cuCtxGetCurrent(&context) != cuda::success) return nullptr;
    } catch (const cuda::NoDriver&) {
        return nullptr;
    }
    return context;
}

void use_context(cuda::Context context) noexcept { driver().cuCtxSetCurrent(context); }

Card::Card(int ordinal) : ordinal_(ordinal) { KVGRPC_CUDA(cuDevicePrimaryCtxRetain, &context_, ordinal); }

Card::~Card() { driver().cuDevicePrimaryCtxRelease_v2(ordinal_); }

Card::Current::Current(const Card& card) noexcept
    : pushed_(driver().cuCtxPushCurrent_v2(card.context_) == cuda::success) {}

Card::Current::~Current() {
    if (!pushed_) return;
    cuda::Context popped = nullptr;
    driver().cuCtxPopCurrent_v2(&popped);
}

std::pair<cuda::Pointer, std::uint64_t> Card::open(const cuda::MemHandle& handle) const {
    const Current current(*this);
    cuda::Pointer pointer = 0;
    KVGRPC_CUDA(cuIpcOpenMemHandle_v2, &pointer, handle, lazy_peer);
    cuda::Pointer base = 0;
    std::size_t size = 0;
    const cuda::Result result = driver().cuMemGetAddressRange_v2(&base, &size, pointer);
    if (result != cuda::success || base != pointer) {
        driver().cuIpcCloseMemHandle(pointer);
        cuda::check("cuMemGetAddressRange", result);
        throw BadRequest("a handle opened inside an allocation and not at its base");
    }
    return {pointer, size};
}

void Card::close(cuda::Pointer pointer) const {
    const Current current(*this);
    KVGRPC_CUDA(cuIpcCloseMemHandle, pointer);
}

void Card::pin(std::byte* start, std::uint64_t size) const {
    const Current current(*this);
    KVGRPC_CUDA(cuMemHostRegister_v2, start, size, portable);
}

void Card::unpin(std::byte* start) const {
    const Current current(*this);
    KVGRPC_CUDA(cuMemHostUnregister, start);
}

std::pair<std::uint64_t, std::uint64_t> Card::memory() const {
    const Current current(*this);
    std::size_t unused = 0;
    std::size_t all = 0;
    KVGRPC_CUDA(cuMemGetInfo_v2, &unused, &all);
    return {unused, all};
}

CardStream::CardStream() { KVGRPC_CUDA(cuStreamCreate, &stream_, non_blocking); }

CardStream::~CardStream() { driver().cuStreamDestroy_v2(stream_); }

CardEvent::CardEvent() { KVGRPC_CUDA(cuEventCreate, &event_, without_timing); }

CardEvent::~CardEvent() { driver().cuEventDestroy_v2(event_); }

IpcEvent::IpcEvent(std::shared_ptr<const Card> card, const cuda::EventHandle& handle) : card_(std::move(card)) {
    const Card::Current current(*card_);
    KVGRPC_CUDA(cuIpcOpenEventHandle, &event_, handle);
}

IpcEvent::~IpcEvent() {
    const Card::Current current(*card_);
    driver().cuEventDestroy_v2(event_);
}

bool IpcEvent::is_over() const {
    const Card::Current current(*card_);
    const cuda::Result result = driver().cuEventQuery(event_);
    if (result == cuda::not_ready) return false;
    cuda::check("cuEventQuery", result);
    return true;
}

Exported export_memory(cuda::Pointer pointer) {
    const int type = attribute<int>(of_memory_type, pointer, 0);
    require(type != 0, "this is no memory that CUDA knows");
    require(type == cuda::device_memory, "this is host memory, not memory of a card");
    const auto context = attribute<cuda::Context>(of_context, pointer, nullptr);
    if (context == nullptr) throw BadRequest(why_not_exported(pointer));
    const Pushed pushed(context);
    cuda::Pointer base = 0;
    std::size_t size = 0;
    if (driver().cuMemGetAddressRange_v2(&base, &size, pointer) != cuda::success) base = pointer;
    Exported out{};
    if (driver().cuIpcGetMemHandle(&out.handle, base) != cuda::success) throw BadRequest(why_not_exported(pointer));
    out.uuid = uuid_of(attribute<int>(of_ordinal, pointer, 0));
    out.offset = pointer - base;
    out.size = size;
    return out;
}

}  // namespace kvgrpc
