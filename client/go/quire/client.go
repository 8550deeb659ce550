package quire

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
)

// Client is a connection to one cachemgr. It is safe for concurrent use.
type Client struct {
	// Service has every call of the contract.
	Service cachev1.CacheServiceClient

	connection *grpc.ClientConn
}

// Dial makes a client of the cachemgr at "unix:/path" or "host:port". It does
// not wait for a connection: a server that is away is an error of the calls.
func Dial(address string, options ...Option) (*Client, error) {
	connection, err := dial(address, options)
	if err != nil {
		return nil, err
	}
	return &Client{Service: cachev1.NewCacheServiceClient(connection), connection: connection}, nil
}

// Close ends the connection and all calls on it. Leases taken with it run out.
func (c *Client) Close() error { return c.connection.Close() }

// LeaseOptions say what lease to take.
type LeaseOptions struct {
	// Pool is its name. Empty: the only one there is.
	Pool string
	// TTL is how long the lease lasts without being renewed, 1 s to 1 h. 0: 30 s.
	TTL time.Duration
	// RequestID makes the call idempotent if it is not empty.
	RequestID string
}

// CreateLease takes the right to hold blocks of a pool, and keeps it: the lease
// is renewed in the background until ctx ends, the lease is deleted, or the
// server says that it is gone. A lease that is renewed no more runs out after
// its TTL, and its blocks come back; Lease.Delete gives them back at once.
//
// ctx is the lease's life; the call itself gets the client's default timeout.
func (c *Client) CreateLease(ctx context.Context, wanted LeaseOptions) (*Lease, error) {
	if wanted.TTL == 0 {
		wanted.TTL = 30 * time.Second
	}
	request := &cachev1.CreateLeaseRequest{Pool: wanted.Pool, Ttl: durationpb.New(wanted.TTL), RequestId: wanted.RequestID}
	asked := time.Now()
	granted, err := c.Service.CreateLease(ctx, request)
	if err != nil {
		return nil, err
	}
	return newLease(ctx, c, granted, wanted.TTL, asked), nil
}
