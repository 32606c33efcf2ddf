// SPDX-License-Identifier: Apache-2.0

// A scheduler in Go: finds and reads what another engine has stored, and stores it again without shared memory.
// examples/README.md says what it does, step by step.
//
//	client unix:/run/kvgrpc/kvgrpc.sock        # or 127.0.0.1:50051
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	kv "kvgrpc/v1"
)

const callTime = 5 * time.Second

// Equal identities share data, unequal ones never: this is that of examples/python_client.py.
func identity(hashAlgorithm string) *kv.SpaceIdentity {
	return &kv.SpaceIdentity{
		Model: "example", Revision: "1", KvDtype: "uint8", KvWorldSize: 1,
		HashAlgorithm: hashAlgorithm, StoredForm: "token-major:2:8:2",
	}
}

func tokens(first uint32) *kv.Content {
	ids := make([]uint32, 600)
	for at := range ids {
		ids[at] = first + uint32(at)
	}
	return &kv.Content{Kind: &kv.Content_Tokens{Tokens: &kv.TokenIds{Ids: ids}}}
}

// hashes of an engine that hashes by itself, one a chunk.
func hashes() *kv.Content {
	own := [][]byte{bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)}
	return &kv.Content{Kind: &kv.Content_Hashes{Hashes: &kv.ChunkHashes{Hashes: own, NumTokens: 600}}}
}

func random(size int) []byte {
	bytes := make([]byte, size)
	if _, err := rand.Read(bytes); err != nil {
		panic(err)
	}
	return bytes
}

// client is one process of an engine. The engine's id is a secret that all its processes share.
type client struct {
	engineID string
	named    context.Context // says which client calls
	engine   kv.EngineServiceClient
	cache    kv.KvCacheServiceClient
	admin    kv.AdminServiceClient
}

func newClient(ctx context.Context, connection *grpc.ClientConn) *client {
	name := "go-" + hex.EncodeToString(random(8))
	return &client{
		engineID: hex.EncodeToString(random(16)),
		named:    metadata.AppendToOutgoingContext(ctx, "kvgrpc-client-id", name),
		engine:   kv.NewEngineServiceClient(connection),
		cache:    kv.NewKvCacheServiceClient(connection),
		admin:    kv.NewAdminServiceClient(connection),
	}
}

func (c *client) call() (context.Context, context.CancelFunc) {
	return context.WithTimeout(c.named, callTime)
}

func (c *client) handshake(identity *kv.SpaceIdentity) (*kv.HandshakeResponse, error) {
	ctx, cancel := c.call()
	defer cancel()
	return c.engine.Handshake(ctx, &kv.HandshakeRequest{ProtocolMajor: 1, ClientVersion: "go example", Identity: identity})
}

// attach opens the session, which lasts as long as the stream is held: until its context ends.
func (c *client) attach() error {
	stream, err := c.engine.Attach(c.named, &kv.AttachRequest{
		EngineId: c.engineID, Role: kv.ClientRole_CLIENT_ROLE_SCHEDULER, SessionId: random(16),
	})
	if err != nil {
		return err
	}
	_, err = stream.Recv() // the first message confirms it
	return err
}

func (c *client) lookup(request string, spaceBase []byte, content *kv.Content) (*kv.LookupResponse, error) {
	ctx, cancel := c.call()
	defer cancel()
	return c.cache.Lookup(ctx, &kv.LookupRequest{
		EngineId: c.engineID, RequestId: request, Space: &kv.SpaceRef{SpaceBase: spaceBase}, Content: content, TpSize: 1,
	})
}

// finalStatus waits until a lookup is final: lower tiers may be read.
func (c *client) finalStatus(job []byte) (*kv.PrefetchStatus, error) {
	for {
		ctx, cancel := c.call()
		answer, err := c.cache.QueryPrefetchStatus(ctx, &kv.QueryPrefetchStatusRequest{
			EngineId: c.engineID, JobId: job, WaitMs: 1000,
		})
		cancel()
		if err != nil || answer.Status.State == kv.PrefetchStatus_STATE_DONE {
			return answer.GetStatus(), err
		}
	}
}

func (c *client) free(job []byte) (uint32, error) {
	ctx, cancel := c.call()
	defer cancel()
	answer, err := c.cache.FreeLookupLocks(ctx, &kv.FreeLookupLocksRequest{EngineId: c.engineID, JobId: job, TpSize: 1})
	return answer.GetReleasedPins(), err
}

// read takes the objects of a hit as parts, in order.
func (c *client) read(job []byte, hitTokens uint32) ([]*kv.ChunkPart, error) {
	ctx, cancel := c.call()
	defer cancel()
	stream, err := c.cache.ReadChunks(ctx, &kv.ReadChunksRequest{
		EngineId: c.engineID, JobId: job, Reader: &kv.Reader{}, Range: &kv.TokenRange{End: hitTokens},
	})
	if err != nil {
		return nil, err
	}
	var parts []*kv.ChunkPart
	whole := false
	for {
		answer, err := stream.Recv()
		switch {
		case err == io.EOF && whole:
			return parts, nil
		case err == io.EOF:
			return nil, errors.New("the stream was torn: its last message is missing")
		case err != nil:
			return nil, err
		case answer.Part == nil:
			whole = true // the results, which come last
		case crc32.ChecksumIEEE(answer.Part.Data) != answer.Part.Checksum:
			return nil, errors.New("bytes were damaged on the way")
		default:
			parts = append(parts, answer.Part)
		}
	}
}

// write stores the chunks that come as parts under other content; how many were stored.
func (c *client) write(spaceBase []byte, content *kv.Content, parts []*kv.ChunkPart) (uint32, error) {
	ctx, cancel := c.call()
	defer cancel()
	stream, err := c.cache.WriteChunks(ctx)
	if err != nil {
		return 0, err
	}
	begin := &kv.ChunksToWrite{
		EngineId: c.engineID, Space: &kv.SpaceRef{SpaceBase: spaceBase}, Content: content,
		ObjectBytes: parts[0].ObjectBytes, Order: parts[0].Order,
	}
	err = stream.Send(&kv.WriteChunksRequest{Kind: &kv.WriteChunksRequest_Begin{Begin: begin}})
	for at := 0; at < len(parts) && err == nil; at++ { // io.EOF: the server has ended it, and CloseAndRecv says why
		err = stream.Send(&kv.WriteChunksRequest{Kind: &kv.WriteChunksRequest_Part{Part: parts[at]}})
	}
	answer, err := stream.CloseAndRecv()
	if err != nil {
		return 0, err
	}
	stored := uint32(0)
	for _, result := range answer.Results {
		if result.Outcome == kv.ChunkOutcome_CHUNK_OUTCOME_STORED {
			stored += result.Count
		}
	}
	return stored, nil
}

// copied reads a prompt and stores its bytes as those of another, whose first token is answered.
func (c *client) copied(spaceBase []byte) (*copyReport, error) {
	found, err := c.lookup("to-read", spaceBase, tokens(1000))
	if err != nil {
		return nil, err
	}
	parts, err := c.read(found.JobId, found.Status.HitTokens)
	if err != nil {
		return nil, err
	}
	report := &copyReport{FirstToken: 1<<20 + binary.LittleEndian.Uint32(random(4))>>1}
	for _, part := range parts {
		report.ReadBytes += len(part.Data)
	}
	if report.StoredChunks, err = c.write(spaceBase, tokens(report.FirstToken), parts); err != nil {
		return nil, err
	}
	again, err := c.lookup("written", spaceBase, tokens(report.FirstToken))
	if err != nil {
		return nil, err
	}
	report.HitTokens = again.Status.HitTokens
	return report, nil
}

type copyReport struct {
	ReadBytes    int    `json:"read_bytes"`
	StoredChunks uint32 `json:"stored_chunks"`
	HitTokens    uint32 `json:"hit_tokens"`
	FirstToken   uint32 `json:"first_token"`
}

type refusal struct {
	Code   string `json:"code"`
	Reason string `json:"reason"`
	Domain string `json:"domain"`
}

var codeNames = map[string]string{"FailedPrecondition": "FAILED_PRECONDITION", "NotFound": "NOT_FOUND"}

// refused reads what a failed call says of itself: its code, and the reason from google.rpc.ErrorInfo.
func refused(err error) *refusal {
	if err == nil {
		return nil
	}
	known := status.Convert(err)
	found := &refusal{Code: known.Code().String()}
	if name, ok := codeNames[found.Code]; ok {
		found.Code = name // as gRPC's other languages write it
	}
	for _, detail := range known.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			found.Reason, found.Domain = info.Reason, info.Domain
		}
	}
	return found
}

type report struct {
	ServerVersion string      `json:"server_version"`
	ServerEpoch   string      `json:"server_epoch"`
	ChunkTokens   uint32      `json:"chunk_tokens"`
	HitTokens     uint32      `json:"hit_tokens"`
	HitL1Chunks   uint32      `json:"hit_l1_chunks"`
	FreedPins     [2]uint32   `json:"freed_pins"`
	HashHitTokens uint32      `json:"hash_hit_tokens"`
	Error         *refusal    `json:"error"`
	Chunks        uint64      `json:"chunks"`
	Copied        *copyReport `json:"copied"`
}

func run(address string) (*report, error) {
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return nil, err
	}
	defer connection.Close()
	ctx, end := context.WithCancel(context.Background())
	defer end()
	client := newClient(ctx, connection)

	hello, err := client.handshake(identity("sha256-u32le")) // the server hashes the tokens
	if err != nil {
		return nil, err
	}
	if err := client.attach(); err != nil {
		return nil, err
	}

	found, err := client.lookup("by-tokens", hello.SpaceBase, tokens(1000))
	if err != nil {
		return nil, err
	}
	if len(found.JobId) == 0 {
		return nil, errors.New("a miss: store something first, with examples/python_client.py")
	}
	hit, err := client.finalStatus(found.JobId)
	if err != nil {
		return nil, err
	}
	var freed [2]uint32
	for at := range freed { // the second time there is nothing left to free
		if freed[at], err = client.free(found.JobId); err != nil {
			return nil, err
		}
	}

	hashed, err := client.handshake(identity("example-hashes"))
	if err != nil {
		return nil, err
	}
	byHashes, err := client.lookup("by-hashes", hashed.SpaceBase, hashes())
	if err != nil {
		return nil, err
	}

	_, unknown := client.lookup("refused", make([]byte, 16), tokens(1000))

	asking, cancel := client.call()
	defer cancel()
	server, err := client.admin.GetStatus(asking, &kv.GetStatusRequest{})
	if err != nil {
		return nil, err
	}
	copied, err := client.copied(hello.SpaceBase)
	if err != nil {
		return nil, err
	}
	return &report{
		ServerVersion: hello.ServerVersion,
		ServerEpoch:   hex.EncodeToString(hello.ServerEpoch),
		ChunkTokens:   hello.ChunkTokens,
		HitTokens:     hit.HitTokens,
		HitL1Chunks:   hit.HitChunksByTier["l1"],
		FreedPins:     freed,
		HashHitTokens: byHashes.Status.HitTokens,
		Error:         refused(unknown),
		Chunks:        server.Chunks,
		Copied:        copied,
	}, nil
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: client ADDRESS   (unix:/path or host:port)")
		os.Exit(2)
	}
	report, err := run(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if err := json.NewEncoder(os.Stdout).Encode(report); err != nil {
		os.Exit(1)
	}
}
