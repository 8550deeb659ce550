package quire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
)

// Error is what a server said when it refused a call, an item of a plan or a
// step, or what gRPC says of a server that did not answer.
type Error struct {
	// Code is the gRPC status code, never OK.
	Code codes.Code
	// Reason says why; empty if the server gave none, as when it was not reached.
	Reason Reason
	// Domain is "cache.quire.dev", "compute.quire.dev", "engine.quire.dev", or empty
	// if the error came inside an answer.
	Domain string
	// Message is for people.
	Message string
	// Metadata has every number and name of the message.
	Metadata map[string]string
	// RetryAfter is how long to wait before asking again, which may help; nil if
	// the server does not say so.
	RetryAfter *time.Duration
	// InAnswer is whether the error came inside an answer on a stream, which goes on.
	InAnswer bool
}

// Reason is why a server refused: the name of an ErrorReason of the contract
// without its prefix. It is an error so that errors.Is(err, reason) can be asked.
// reasons.go has the constants.
type Reason string

// ErrUnavailable is no reason of the contract: every error with the code
// UNAVAILABLE is it, whatever its reason. The server is away, was restarted or
// drains; whether the call was applied is not known unless there is a reason.
const ErrUnavailable Reason = "UNAVAILABLE"

// Error makes a Reason an error.
func (r Reason) Error() string { return string(r) }

// Error is "REASON: message", with the code's name where there is no reason.
func (e *Error) Error() string {
	if e.Reason == "" {
		return fmt.Sprintf("%s: %s", e.Code, e.Message)
	}
	return fmt.Sprintf("%s: %s", e.Reason, e.Message)
}

// Is is true for the error's Reason, for ErrUnavailable if that is its code, and
// for context.DeadlineExceeded and context.Canceled if they ended the call.
func (e *Error) Is(target error) bool {
	switch target {
	case context.DeadlineExceeded:
		return e.Code == codes.DeadlineExceeded
	case context.Canceled:
		return e.Code == codes.Canceled
	case ErrUnavailable:
		return e.Code == codes.Unavailable
	}
	reason, ok := target.(Reason)
	return ok && reason != "" && reason == e.Reason
}

// Number is an integer of the metadata, and whether there is one.
func (e *Error) Number(key string) (int64, bool) {
	number, err := strconv.ParseInt(e.Metadata[key], 10, 64)
	return number, err == nil
}

// GRPCStatus makes status.Code and status.FromError work.
func (e *Error) GRPCStatus() *status.Status {
	plain := status.New(e.Code, e.Message)
	if e.Reason == "" {
		return plain
	}
	details := []protoadapt.MessageV1{protoadapt.MessageV1Of(
		&errdetails.ErrorInfo{Reason: string(e.Reason), Domain: e.Domain, Metadata: e.Metadata})}
	if e.RetryAfter != nil {
		details = append(details, protoadapt.MessageV1Of(
			&errdetails.RetryInfo{RetryDelay: durationpb.New(*e.RetryAfter)}))
	}
	if detailed, err := plain.WithDetails(details...); err == nil {
		return detailed
	}
	return plain
}

// RefusalError is the error of a refused item of a plan, nil for nil.
func RefusalError(refusal *cachev1.Refusal) error {
	if refusal == nil {
		return nil
	}
	return errorOfAnswer(refusal.GetError(), false)
}

// errorOfAnswer is an Error inside an answer; onStream is whether the answer came on a stream.
func errorOfAnswer(said *cachev1.Error, onStream bool) *Error {
	return &Error{
		Code:       codes.Code(said.GetCode()),
		Reason:     Reason(said.GetReason()),
		Message:    said.GetMessage(),
		Metadata:   maps.Clone(said.GetMetadata()),
		RetryAfter: durationOf(said.GetRetryDelay()),
		InAnswer:   onStream,
	}
}

// errorOfCall is what a call failed with as an *Error. The end of a stream stays io.EOF.
func errorOfCall(err error) error {
	if err == nil || err == io.EOF {
		return err
	}
	var already *Error
	if errors.As(err, &already) {
		return err
	}
	said := status.Convert(err)
	converted := &Error{Code: said.Code(), Message: said.Message()}
	for _, detail := range said.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			converted.Reason, converted.Domain = Reason(detail.GetReason()), detail.GetDomain()
			converted.Metadata = detail.GetMetadata()
		case *errdetails.RetryInfo:
			converted.RetryAfter = durationOf(detail.GetRetryDelay())
		}
	}
	return converted
}

func durationOf(message *durationpb.Duration) *time.Duration {
	if message == nil {
		return nil
	}
	duration := message.AsDuration()
	return &duration
}
