package quire

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
)

const (
	defaultTimeout     = 10 * time.Second
	defaultStepTimeout = 5 * time.Minute // the first step of a worker may compile kernels
	maxMessageBytes    = 64 << 20        // the servers' limit
)

// An Option of Dial, DialWorker and DialEngine.
type Option func(*options)

type options struct {
	timeout     time.Duration
	stepTimeout time.Duration
	tls         *tls.Config
	token       func() (string, error)
	dial        []grpc.DialOption
}

// WithTimeout sets the deadline of calls with a context that has none. Default 10 s.
func WithTimeout(timeout time.Duration) Option {
	return func(o *options) { o.timeout = timeout }
}

// WithStepTimeout sets the deadline of Worker.Run, and of an engine's
// GenerateBatch, if the context has none. Default 5 minutes.
func WithStepTimeout(timeout time.Duration) Option {
	return func(o *options) { o.stepTimeout = timeout }
}

// WithTLS makes calls over TLS: RootCAs are the authorities of the server's
// certificate, Certificates the client's own. Unix sockets stay plain, as they
// are at the servers.
func WithTLS(config *tls.Config) Option {
	return func(o *options) { o.tls = config }
}

// WithToken shows a bearer token with every call.
func WithToken(token string) Option {
	return WithTokenSource(func() (string, error) { return token, nil })
}

// WithTokenSource asks for the bearer token at every call, so that it can be
// replaced. The source must be safe for concurrent use.
func WithTokenSource(source func() (string, error)) Option {
	return func(o *options) { o.token = source }
}

// WithDialOptions passes options on to gRPC, after this package's own.
// Interceptors have to be chained (grpc.WithChainUnaryInterceptor), or they
// replace those that make errors and deadlines what this package says.
func WithDialOptions(dial ...grpc.DialOption) Option {
	return func(o *options) { o.dial = append(o.dial, dial...) }
}

func dial(address string, given []Option) (*grpc.ClientConn, error) {
	chosen := options{timeout: defaultTimeout, stepTimeout: defaultStepTimeout}
	for _, option := range given {
		option(&chosen)
	}
	onSocket := strings.HasPrefix(address, "unix:")
	transport := insecure.NewCredentials()
	if chosen.tls != nil && !onSocket {
		transport = credentials.NewTLS(chosen.tls)
	}
	all := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithUnaryInterceptor(chosen.unary),
		grpc.WithStreamInterceptor(stream),
		grpc.WithNoProxy(),
		grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 20 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: defaultTimeout,
		}),
	}
	if chosen.token != nil {
		if !onSocket && chosen.tls == nil && !isLoopback(address) {
			return nil, fmt.Errorf("quire: a token is not sent in plain text to %s: use WithTLS", address)
		}
		all = append(all, grpc.WithPerRPCCredentials(bearer{chosen.token}))
	}
	return grpc.NewClient(address, append(all, chosen.dial...)...)
}

// isLoopback is whether nothing sent to host:port leaves this machine. A name nobody knows may.
func isLoopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	found, err := net.LookupIP(host)
	for _, ip := range found {
		if !ip.IsLoopback() {
			return false
		}
	}
	return err == nil && len(found) > 0
}

// bearer shows a token. Whether the transport is private enough is checked by dial.
type bearer struct {
	source func() (string, error)
}

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	token, err := b.source()
	if err != nil {
		return nil, err
	}
	if token == "" || strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, errors.New("quire: a token is one word of printable ASCII")
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

func (bearer) RequireTransportSecurity() bool { return false }
