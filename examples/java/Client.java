// SPDX-License-Identifier: Apache-2.0
// A scheduler in Java: finds what another engine has stored. examples/README.md says what it does, step by step.
//
//     client 127.0.0.1:50051        # or unix:/path, where netty has its native transport: Debian's has not

import com.google.protobuf.ByteString;
import com.google.rpc.ErrorInfo;
import io.grpc.ClientInterceptor;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.stub.MetadataUtils;
import io.netty.channel.EventLoopGroup;
import io.netty.channel.epoll.Epoll;
import io.netty.channel.epoll.EpollDomainSocketChannel;
import io.netty.channel.epoll.EpollEventLoopGroup;
import io.netty.channel.nio.NioEventLoopGroup;
import io.netty.channel.socket.nio.NioSocketChannel;
import io.netty.channel.unix.DomainSocketAddress;
import java.security.SecureRandom;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.concurrent.TimeUnit;
import java.util.stream.IntStream;
import kvgrpc.v1.Admin;
import kvgrpc.v1.AdminServiceGrpc;
import kvgrpc.v1.Cache;
import kvgrpc.v1.Common;
import kvgrpc.v1.Engine;
import kvgrpc.v1.EngineServiceGrpc;
import kvgrpc.v1.KvCacheServiceGrpc;

/** One process of an engine. The engine's id is a secret that all its processes share. */
public final class Client implements AutoCloseable {
  private static final long CALL_S = 5;
  private static final SecureRandom RANDOM = new SecureRandom();
  private static final Metadata.Key<byte[]> DETAILS =
      Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);

  private final String engineId = hex(random(16));
  private final Context.CancellableContext session = Context.current().withCancellation();
  private final EventLoopGroup loops;
  private final ManagedChannel channel;
  private final ClientInterceptor named;

  public Client(String address) {
    boolean unix = address.startsWith("unix:");
    if (unix && !Epoll.isAvailable()) { // as with Debian's netty; the one of Maven Central brings it
      throw new IllegalStateException("this netty has no native transport for Unix sockets: use host:port");
    }
    loops = unix ? new EpollEventLoopGroup(1) : new NioEventLoopGroup(1);
    channel = open(address, unix);
    Metadata metadata = new Metadata();
    metadata.put(Metadata.Key.of("kvgrpc-client-id", Metadata.ASCII_STRING_MARSHALLER), "java-" + hex(random(8)));
    named = MetadataUtils.newAttachHeadersInterceptor(metadata);
  }

  private ManagedChannel open(String address, boolean unix) {
    NettyChannelBuilder builder =
        unix
            ? NettyChannelBuilder.forAddress(new DomainSocketAddress(address.substring("unix:".length())))
            : NettyChannelBuilder.forTarget(address);
    return builder
        .eventLoopGroup(loops)
        .channelType(unix ? EpollDomainSocketChannel.class : NioSocketChannel.class)
        .usePlaintext()
        .build();
  }

  private EngineServiceGrpc.EngineServiceBlockingStub engine() {
    return EngineServiceGrpc.newBlockingStub(channel).withInterceptors(named);
  }

  private KvCacheServiceGrpc.KvCacheServiceBlockingStub cache() {
    return KvCacheServiceGrpc.newBlockingStub(channel)
        .withInterceptors(named)
        .withDeadlineAfter(CALL_S, TimeUnit.SECONDS);
  }

  Engine.HandshakeResponse handshake(Common.SpaceIdentity identity) {
    return engine()
        .withDeadlineAfter(CALL_S, TimeUnit.SECONDS)
        .handshake(
            Engine.HandshakeRequest.newBuilder()
                .setProtocolMajor(1)
                .setClientVersion("java example")
                .setIdentity(identity)
                .build());
  }

  /** Opens the session, which lasts as long as the stream is held: until its context is cancelled. */
  void attach() {
    Engine.AttachRequest request =
        Engine.AttachRequest.newBuilder()
            .setEngineId(engineId)
            .setRole(Engine.ClientRole.CLIENT_ROLE_SCHEDULER)
            .setSessionId(ByteString.copyFrom(random(16)))
            .build();
    session.run(() -> engine().attach(request).next()); // the first message confirms it
  }

  Cache.LookupResponse lookup(String requestId, ByteString spaceBase, Common.Content content) {
    return cache()
        .lookup(
            Cache.LookupRequest.newBuilder()
                .setEngineId(engineId)
                .setRequestId(requestId)
                .setSpace(Common.SpaceRef.newBuilder().setSpaceBase(spaceBase))
                .setContent(content)
                .setTpSize(1)
                .build());
  }

  /** Waits until a lookup is final: lower tiers may be read. */
  Cache.PrefetchStatus finalStatus(ByteString jobId) {
    Cache.QueryPrefetchStatusRequest request =
        Cache.QueryPrefetchStatusRequest.newBuilder().setEngineId(engineId).setJobId(jobId).setWaitMs(1000).build();
    while (true) {
      Cache.PrefetchStatus status = cache().queryPrefetchStatus(request).getStatus();
      if (status.getState() == Cache.PrefetchStatus.State.STATE_DONE) {
        return status;
      }
    }
  }

  int free(ByteString jobId) {
    return cache()
        .freeLookupLocks(
            Cache.FreeLookupLocksRequest.newBuilder().setEngineId(engineId).setJobId(jobId).setTpSize(1).build())
        .getReleasedPins();
  }

  Admin.GetStatusResponse status() {
    return AdminServiceGrpc.newBlockingStub(channel)
        .withDeadlineAfter(CALL_S, TimeUnit.SECONDS)
        .getStatus(Admin.GetStatusRequest.getDefaultInstance());
  }

  @Override
  public void close() {
    session.cancel(null);
    channel.shutdownNow();
    loops.shutdownGracefully(0, 1, TimeUnit.SECONDS);
  }

  /** What a refusal says of itself: its code, and the reason from google.rpc.ErrorInfo in the trailers. */
  private static String refusal(StatusRuntimeException error) throws com.google.protobuf.InvalidProtocolBufferException {
    Metadata trailers = error.getTrailers();
    byte[] details = trailers == null ? null : trailers.get(DETAILS);
    ErrorInfo info = ErrorInfo.getDefaultInstance();
    if (details != null) {
      for (com.google.protobuf.Any detail : com.google.rpc.Status.parseFrom(details).getDetailsList()) {
        if (detail.is(ErrorInfo.class)) {
          info = detail.unpack(ErrorInfo.class);
        }
      }
    }
    return String.format(
        "{\"code\":\"%s\",\"reason\":\"%s\",\"domain\":\"%s\"}",
        error.getStatus().getCode(), info.getReason(), info.getDomain());
  }

  private static byte[] random(int size) {
    byte[] bytes = new byte[size];
    RANDOM.nextBytes(bytes);
    return bytes;
  }

  private static String hex(byte[] bytes) {
    return HexFormat.of().formatHex(bytes);
  }

  // Equal identities share data, unequal ones never: this is that of examples/python_client.py.
  private static Common.SpaceIdentity identity(String hashAlgorithm) {
    return Common.SpaceIdentity.newBuilder()
        .setModel("example")
        .setRevision("1")
        .setKvDtype("uint8")
        .setKvWorldSize(1)
        .setHashAlgorithm(hashAlgorithm)
        .setStoredForm("token-major:2:8:2")
        .build();
  }

  private static Common.Content tokens() {
    Common.TokenIds.Builder ids = Common.TokenIds.newBuilder();
    IntStream.range(1000, 1600).forEach(ids::addIds);
    return Common.Content.newBuilder().setTokens(ids).build();
  }

  /** Hashes of an engine that hashes by itself, one a chunk. */
  private static Common.Content hashes() {
    Common.ChunkHashes.Builder hashes = Common.ChunkHashes.newBuilder().setNumTokens(600);
    for (byte chunk = 1; chunk <= 2; chunk++) {
      byte[] hash = new byte[32];
      Arrays.fill(hash, chunk);
      hashes.addHashes(ByteString.copyFrom(hash));
    }
    return Common.Content.newBuilder().setHashes(hashes).build();
  }

  private static String run(Client client) throws com.google.protobuf.InvalidProtocolBufferException {
    Engine.HandshakeResponse hello = client.handshake(identity("sha256-u32le")); // the server hashes the tokens
    client.attach();

    Cache.LookupResponse found = client.lookup("by-tokens", hello.getSpaceBase(), tokens());
    if (found.getJobId().isEmpty()) {
      throw new IllegalStateException("a miss: store something first, with examples/python_client.py");
    }
    Cache.PrefetchStatus hit = client.finalStatus(found.getJobId());
    int freed = client.free(found.getJobId());
    int freedAgain = client.free(found.getJobId());

    Engine.HandshakeResponse hashed = client.handshake(identity("example-hashes"));
    Cache.LookupResponse byHashes = client.lookup("by-hashes", hashed.getSpaceBase(), hashes());

    String error = "null";
    try {
      client.lookup("refused", ByteString.copyFrom(new byte[16]), tokens());
    } catch (StatusRuntimeException refused) {
      error = refusal(refused);
    }

    return String.format(
        "{\"server_version\":\"%s\",\"server_epoch\":\"%s\",\"chunk_tokens\":%d,\"hit_tokens\":%d,"
            + "\"hit_l1_chunks\":%d,\"freed_pins\":[%d,%d],\"hash_hit_tokens\":%d,\"error\":%s,\"chunks\":%d}",
        hello.getServerVersion(),
        hex(hello.getServerEpoch().toByteArray()),
        hello.getChunkTokens(),
        hit.getHitTokens(),
        hit.getHitChunksByTierOrDefault("l1", 0),
        freed,
        freedAgain,
        byHashes.getStatus().getHitTokens(),
        error,
        client.status().getChunks());
  }

  public static void main(String[] arguments) {
    if (arguments.length != 1) {
      System.err.println("usage: client ADDRESS   (unix:/path or host:port)");
      System.exit(2);
    }
    try (Client client = new Client(arguments[0])) {
      System.out.println(run(client));
    } catch (Exception error) { // whatever it was: say it and fail
      System.err.println(error.getMessage());
      System.exit(1);
    }
  }
}
