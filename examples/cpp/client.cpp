// SPDX-License-Identifier: Apache-2.0
// A scheduler in C++: finds what another engine has stored. examples/README.md says what it does, step by step.
//
//     client unix:/run/kvgrpc/kvgrpc.sock        # or 127.0.0.1:50051

#include <google/rpc/error_details.pb.h>
#include <google/rpc/status.pb.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <iostream>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

#include "kvgrpc/v1/admin.grpc.pb.h"
#include "kvgrpc/v1/cache.grpc.pb.h"
#include "kvgrpc/v1/engine.grpc.pb.h"

namespace kv = kvgrpc::v1;

namespace {

constexpr auto kCallTime = std::chrono::seconds(5);

std::string random_bytes(std::size_t size) {
  std::random_device source;
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(source());
  return bytes;
}

std::string hex(const std::string& bytes) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  for (unsigned char byte : bytes) {
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

// Equal identities share data, unequal ones never: this is that of examples/python_client.py.
kv::SpaceIdentity identity(const std::string& hash_algorithm) {
  kv::SpaceIdentity identity;
  identity.set_model("example");
  identity.set_revision("1");
  identity.set_kv_dtype("uint8");
  identity.set_kv_world_size(1);
  identity.set_hash_algorithm(hash_algorithm);
  identity.set_stored_form("token-major:2:8:2");
  return identity;
}

kv::Content tokens() {
  kv::Content content;
  for (std::uint32_t id = 1000; id < 1600; ++id) content.mutable_tokens()->add_ids(id);
  return content;
}

// Hashes of an engine that hashes by itself, one a chunk.
kv::Content hashes() {
  kv::Content content;
  content.mutable_hashes()->add_hashes(std::string(32, '\1'));
  content.mutable_hashes()->add_hashes(std::string(32, '\2'));
  content.mutable_hashes()->set_num_tokens(600);
  return content;
}

// A failed call: the reason is in google.rpc.ErrorInfo, inside the details.
struct Refused : std::runtime_error {
  explicit Refused(const grpc::Status& status)
      : std::runtime_error(status.error_message()), code(status.error_code()) {
    google::rpc::Status rich;
    if (!rich.ParseFromString(status.error_details())) return;
    for (const auto& detail : rich.details()) {
      if (detail.Is<google::rpc::ErrorInfo>()) detail.UnpackTo(&info);
    }
  }

  grpc::StatusCode code;
  google::rpc::ErrorInfo info;
};

// One process of an engine. The engine's id is a secret that all its processes share.
class Client {
 public:
  explicit Client(const std::string& address)
      : client_id_("cpp-" + hex(random_bytes(8))), engine_id_(hex(random_bytes(16))) {
    auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
    engine_ = kv::EngineService::NewStub(channel);
    cache_ = kv::KvCacheService::NewStub(channel);
    admin_ = kv::AdminService::NewStub(channel);
  }

  ~Client() {
    held_.TryCancel();
    if (session_ != nullptr) session_->Finish();
  }

  kv::HandshakeResponse handshake(const kv::SpaceIdentity& identity) {
    kv::HandshakeRequest request;
    request.set_protocol_major(1);
    request.set_client_version("cpp example");
    *request.mutable_identity() = identity;
    return call(*engine_, &kv::EngineService::Stub::Handshake, request);
  }

  // Opens the session, which lasts as long as the stream is held.
  void attach() {
    kv::AttachRequest request;
    request.set_engine_id(engine_id_);
    request.set_role(kv::CLIENT_ROLE_SCHEDULER);
    request.set_session_id(random_bytes(16));
    held_.AddMetadata("kvgrpc-client-id", client_id_);
    session_ = engine_->Attach(&held_, request);
    kv::AttachResponse first;
    if (!session_->Read(&first)) throw Refused(std::exchange(session_, nullptr)->Finish());
  }

  kv::LookupResponse lookup(const std::string& request_id, const std::string& space_base, const kv::Content& content) {
    kv::LookupRequest request;
    request.set_engine_id(engine_id_);
    request.set_request_id(request_id);
    request.mutable_space()->set_space_base(space_base);
    *request.mutable_content() = content;
    request.set_tp_size(1);
    return call(*cache_, &kv::KvCacheService::Stub::Lookup, request);
  }

  // Waits until a lookup is final: lower tiers may be read.
  kv::PrefetchStatus final_status(const std::string& job_id) {
    kv::QueryPrefetchStatusRequest request;
    request.set_engine_id(engine_id_);
    request.set_job_id(job_id);
    request.set_wait_ms(1000);
    for (;;) {
      auto status = call(*cache_, &kv::KvCacheService::Stub::QueryPrefetchStatus, request).status();
      if (status.state() == kv::PrefetchStatus::STATE_DONE) return status;
    }
  }

  std::uint32_t free(const std::string& job_id) {
    kv::FreeLookupLocksRequest request;
    request.set_engine_id(engine_id_);
    request.set_job_id(job_id);
    request.set_tp_size(1);
    return call(*cache_, &kv::KvCacheService::Stub::FreeLookupLocks, request).released_pins();
  }

  kv::GetStatusResponse status() { return call(*admin_, &kv::AdminService::Stub::GetStatus, kv::GetStatusRequest()); }

 private:
  template <class Stub, class Request, class Response>
  Response call(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                const Request& request) {
    grpc::ClientContext context;
    context.AddMetadata("kvgrpc-client-id", client_id_);
    context.set_deadline(std::chrono::system_clock::now() + kCallTime);
    Response response;
    const grpc::Status status = (stub.*method)(&context, request, &response);
    if (!status.ok()) throw Refused(status);
    return response;
  }

  std::string client_id_, engine_id_;
  std::unique_ptr<kv::EngineService::Stub> engine_;
  std::unique_ptr<kv::KvCacheService::Stub> cache_;
  std::unique_ptr<kv::AdminService::Stub> admin_;
  grpc::ClientContext held_;
  std::unique_ptr<grpc::ClientReader<kv::AttachResponse>> session_;
};

void run(const std::string& address) {
  Client client(address);
  const auto hello = client.handshake(identity("sha256-u32le"));  // the server hashes the tokens
  client.attach();

  const auto found = client.lookup("by-tokens", hello.space_base(), tokens());
  if (found.job_id().empty()) throw std::runtime_error("a miss: store something first, with examples/python_client.py");
  const auto hit = client.final_status(found.job_id());
  const auto freed = client.free(found.job_id());
  const auto freed_again = client.free(found.job_id());

  const auto hashed = client.handshake(identity("example-hashes"));
  const auto by_hashes = client.lookup("by-hashes", hashed.space_base(), hashes());

  std::string error = "null";
  try {
    client.lookup("refused", std::string(16, '\0'), tokens());
  } catch (const Refused& refused) {
    const std::string code = refused.code == grpc::StatusCode::FAILED_PRECONDITION ? "FAILED_PRECONDITION"
                                                                                   : std::to_string(refused.code);
    error = R"({"code":")" + code + R"(","reason":")" + refused.info.reason() + R"(","domain":")" +
            refused.info.domain() + "\"}";
  }

  const auto server = client.status();
  const auto tier = hit.hit_chunks_by_tier().find("l1");
  std::cout << R"({"server_version":")" << hello.server_version() << R"(","server_epoch":")"
            << hex(hello.server_epoch()) << R"(","chunk_tokens":)" << hello.chunk_tokens() << R"(,"hit_tokens":)"
            << hit.hit_tokens() << R"(,"hit_l1_chunks":)"
            << (tier == hit.hit_chunks_by_tier().end() ? 0 : tier->second) << R"(,"freed_pins":[)" << freed << ","
            << freed_again << R"(],"hash_hit_tokens":)" << by_hashes.status().hit_tokens() << R"(,"error":)" << error
            << R"(,"chunks":)" << server.chunks() << "}" << std::endl;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::cerr << "usage: client ADDRESS   (unix:/path or host:port)\n";
    return 2;
  }
  try {
    run(arguments[1]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
