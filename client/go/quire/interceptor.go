package quire

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	computev1 "github.com/quire-kv/quire/client/go/quire/compute/v1"
	enginev1 "github.com/quire-kv/quire/client/go/quire/engine/v1"
)

// unary gives calls a deadline and makes what they fail with an *Error.
func (o options) unary(ctx context.Context, method string, request, reply any, connection *grpc.ClientConn,
	invoke grpc.UnaryInvoker, call ...grpc.CallOption) error {
	if _, ok := ctx.Deadline(); !ok {
		timeout := o.timeout
		switch method {
		case computev1.WorkerService_RunStep_FullMethodName, enginev1.EngineService_GenerateBatch_FullMethodName:
			timeout = o.stepTimeout
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	return errorOfCall(invoke(ctx, method, request, reply, connection, call...))
}

func stream(ctx context.Context, description *grpc.StreamDesc, connection *grpc.ClientConn, method string,
	open grpc.Streamer, call ...grpc.CallOption) (grpc.ClientStream, error) {
	opened, err := open(ctx, description, connection, method, call...)
	if err != nil {
		return nil, errorOfCall(err)
	}
	return clientStream{opened}, nil
}

// clientStream makes what a stream fails with an *Error.
type clientStream struct {
	grpc.ClientStream
}

func (s clientStream) Header() (metadata.MD, error) {
	header, err := s.ClientStream.Header()
	return header, errorOfCall(err)
}

func (s clientStream) SendMsg(message any) error { return errorOfCall(s.ClientStream.SendMsg(message)) }

func (s clientStream) RecvMsg(message any) error { return errorOfCall(s.ClientStream.RecvMsg(message)) }
