// SPDX-License-Identifier: Apache-2.0
// A scheduler in TypeScript: finds and reads what another engine has stored, and stores it again without shared memory.
// examples/README.md says what it does, step by step.
//
//     node out/client.js unix:/run/kvgrpc/kvgrpc.sock        # or 127.0.0.1:50051

import { randomBytes, randomInt } from "node:crypto";
import { once } from "node:events";
import { Readable, type Writable } from "node:stream";
import { crc32 } from "node:zlib";
import * as grpc from "@grpc/grpc-js";
import { ErrorInfo } from "./stubs/google/rpc/error_details.js";
import { Status } from "./stubs/google/rpc/status.js";
import { AdminServiceClient, GetStatusRequest } from "./stubs/kvgrpc/v1/admin.js";
import * as cache from "./stubs/kvgrpc/v1/cache.js";
import { Content, SpaceIdentity } from "./stubs/kvgrpc/v1/common.js";
import * as engine from "./stubs/kvgrpc/v1/engine.js";

const tokens = (first: number) => Array.from({ length: 600 }, (_, at) => first + at);
const PROMPT = tokens(1000);
const HASHES = [Buffer.alloc(32, 1), Buffer.alloc(32, 2)]; // of an engine that hashes by itself, one a chunk
const CALL_MS = 5000;

// Equal identities share data, unequal ones never: this is that of examples/python_client.py.
const IDENTITY: SpaceIdentity = {
  model: "example",
  revision: "1",
  kvDtype: "uint8",
  kvWorldSize: 1,
  hashAlgorithm: "sha256-u32le", // the server hashes the tokens
  storedForm: "token-major:2:8:2",
};

type Unary<Request, Response> = (
  request: Request,
  metadata: grpc.Metadata,
  options: Partial<grpc.CallOptions>,
  callback: (error: grpc.ServiceError | null, response: Response) => void,
) => grpc.ClientUnaryCall;

class Client {
  readonly engineId = randomBytes(16).toString("hex"); // a secret that all processes of an engine share
  private readonly metadata = new grpc.Metadata();
  private readonly engine: engine.EngineServiceClient;
  private readonly cache: cache.KvCacheServiceClient;
  private readonly admin: AdminServiceClient;
  private session?: grpc.ClientReadableStream<engine.AttachResponse>;

  constructor(address: string) {
    const credentials = grpc.credentials.createInsecure();
    this.metadata.set("kvgrpc-client-id", `typescript-${randomBytes(8).toString("hex")}`);
    this.engine = new engine.EngineServiceClient(address, credentials);
    this.cache = new cache.KvCacheServiceClient(address, credentials);
    this.admin = new AdminServiceClient(address, credentials);
  }

  private call<Request, Response>(on: grpc.Client, method: Unary<Request, Response>, request: Request): Promise<Response> {
    return new Promise((resolve, reject) => {
      const options = { deadline: Date.now() + CALL_MS };
      method.call(on, request, this.metadata, options, (error, response) => (error ? reject(error) : resolve(response)));
    });
  }

  handshake(identity: SpaceIdentity) {
    const request = engine.HandshakeRequest.fromPartial({ protocolMajor: 1, clientVersion: "typescript example", identity });
    return this.call(this.engine, this.engine.handshake, request);
  }

  /** Opens the session, which lasts as long as the stream is held. */
  async attach(): Promise<void> {
    const role = engine.ClientRole.CLIENT_ROLE_SCHEDULER;
    this.session = this.engine.attach({ engineId: this.engineId, role, sessionId: randomBytes(16) }, this.metadata);
    await once(this.session, "data"); // the first message confirms it; an error rejects
    this.session.on("error", () => {}); // how a session ends
    this.session.resume();
  }

  lookup(requestId: string, spaceBase: Buffer, content: Partial<Content>) {
    const space = { spaceBase };
    const request = cache.LookupRequest.fromPartial({ engineId: this.engineId, requestId, space, content, tpSize: 1 });
    return this.call(this.cache, this.cache.lookup, request);
  }

  /** Waits until a lookup is final: lower tiers may be read. */
  async finalStatus(jobId: Buffer): Promise<cache.PrefetchStatus> {
    for (;;) {
      const request = { engineId: this.engineId, jobId, waitMs: 1000 };
      const { status } = await this.call(this.cache, this.cache.queryPrefetchStatus, request);
      if (status?.state === cache.PrefetchStatus_State.STATE_DONE) return status;
    }
  }

  async free(jobId: Buffer): Promise<number> {
    const request = cache.FreeLookupLocksRequest.fromPartial({ engineId: this.engineId, jobId, tpSize: 1 });
    return (await this.call(this.cache, this.cache.freeLookupLocks, request)).releasedPins;
  }

  /** The objects of a hit as parts, in order. */
  async read(jobId: Buffer, hitTokens: number): Promise<cache.ChunkPart[]> {
    const asked = { engineId: this.engineId, jobId, reader: {}, range: { end: hitTokens } };
    const options = { deadline: Date.now() + CALL_MS };
    const parts: cache.ChunkPart[] = [];
    let whole = false;
    for await (const answer of this.cache.readChunks(cache.ReadChunksRequest.fromPartial(asked), this.metadata, options)) {
      const { part } = answer as cache.ReadChunksResponse;
      if (part === undefined) whole = true; // the results, which come last
      else if (crc32(part.data) !== part.checksum) throw new Error("bytes were damaged on the way");
      else parts.push(part);
    }
    if (!whole) throw new Error("the stream was torn: its last message is missing");
    return parts;
  }

  /** Stores the chunks that come as parts under other content; how many were stored. */
  async write(spaceBase: Buffer, content: Partial<Content>, parts: cache.ChunkPart[]): Promise<number> {
    const { objectBytes, order } = parts[0];
    const begin = { engineId: this.engineId, space: { spaceBase }, content, objectBytes, order };
    const messages = [{ begin }, ...parts.map((part) => ({ part }))].map(cache.WriteChunksRequest.fromPartial);
    const answer = await new Promise<cache.WriteChunksResponse>((resolve, reject) => {
      const options = { deadline: Date.now() + CALL_MS };
      const stream = this.cache.writeChunks(this.metadata, options, (error, response) =>
        error ? reject(error) : resolve(response),
      );
      Readable.from(messages).pipe(stream as unknown as Writable); // whose type says bytes and strings only
    });
    const stored = answer.results.filter((result) => result.outcome === cache.ChunkOutcome.CHUNK_OUTCOME_STORED);
    return stored.reduce((sum, result) => sum + result.count, 0);
  }

  getStatus() {
    return this.call(this.admin, this.admin.getStatus, GetStatusRequest.create());
  }

  close(): void {
    this.session?.cancel();
    for (const client of [this.engine, this.cache, this.admin]) client.close();
  }
}

/** What a refusal says: its gRPC code, and the reason from google.rpc.ErrorInfo in the trailers. */
function refusal(error: grpc.ServiceError) {
  const [raw] = error.metadata.get("grpc-status-details-bin");
  const details = raw instanceof Buffer ? Status.decode(raw).details : [];
  const packed = details.find((detail) => detail.typeUrl.endsWith("/google.rpc.ErrorInfo"));
  const info = ErrorInfo.decode(packed?.value ?? Buffer.alloc(0));
  return { code: grpc.status[error.code], reason: info.reason, domain: info.domain };
}

async function main(address: string): Promise<void> {
  const client = new Client(address);
  try {
    const hello = await client.handshake(IDENTITY);
    await client.attach();

    const found = await client.lookup("by-tokens", hello.spaceBase, { tokens: { ids: PROMPT } });
    if (found.jobId.length === 0) throw new Error("a miss: store something first, with examples/python_client.py");
    const status = await client.finalStatus(found.jobId);
    const freed = [await client.free(found.jobId), await client.free(found.jobId)];

    const hashed = await client.handshake({ ...IDENTITY, hashAlgorithm: "example-hashes" });
    const content = { hashes: { hashes: HASHES, numTokens: PROMPT.length, firstChunk: 0 } };
    const byHashes = await client.lookup("by-hashes", hashed.spaceBase, content);

    const unknown = client.lookup("refused", Buffer.alloc(16), { tokens: { ids: PROMPT } });
    const error = await unknown.then(() => null, refusal);

    const server = await client.getStatus();

    const again = await client.lookup("to-read", hello.spaceBase, { tokens: { ids: PROMPT } });
    const parts = await client.read(again.jobId, again.status?.hitTokens ?? 0);
    const firstToken = randomInt(2 ** 20, 2 ** 31);
    const stored = await client.write(hello.spaceBase, { tokens: { ids: tokens(firstToken) } }, parts);
    const written = await client.lookup("written", hello.spaceBase, { tokens: { ids: tokens(firstToken) } });
    const report = {
      server_version: hello.serverVersion,
      server_epoch: hello.serverEpoch.toString("hex"),
      chunk_tokens: hello.chunkTokens,
      hit_tokens: status.hitTokens,
      hit_l1_chunks: status.hitChunksByTier["l1"] ?? 0,
      freed_pins: freed,
      hash_hit_tokens: byHashes.status?.hitTokens ?? 0,
      error,
      chunks: Number(server.chunks),
      copied: {
        read_bytes: parts.reduce((sum, part) => sum + part.data.length, 0),
        stored_chunks: stored,
        hit_tokens: written.status?.hitTokens ?? 0,
        first_token: firstToken,
      },
    };
    console.log(JSON.stringify(report));
  } finally {
    client.close();
  }
}

const [address] = process.argv.slice(2);
if (address === undefined) {
  console.error("usage: node out/client.js ADDRESS   (unix:/path or host:port)");
  process.exit(2);
}
main(address).catch((error: unknown) => {
  console.error(error instanceof Error ? error.message : error);
  process.exitCode = 1;
});
