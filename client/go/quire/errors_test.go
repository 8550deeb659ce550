package quire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
)

func refused(t *testing.T, code codes.Code, details ...protoadapt.MessageV1) error {
	t.Helper()
	said, err := status.New(code, "why").WithDetails(details...)
	if err != nil {
		t.Fatal(err)
	}
	return said.Err()
}

func TestAStatusWithErrorInfoBecomesAnError(t *testing.T) {
	err := errorOfCall(refused(t, codes.ResourceExhausted, &errdetails.ErrorInfo{
		Reason: "OUT_OF_BLOCKS", Domain: "cache.quire.dev", Metadata: map[string]string{"needed": "7"}}))
	wrapped := fmt.Errorf("planning: %w", err)
	if !errors.Is(wrapped, ErrOutOfBlocks) || errors.Is(wrapped, ErrLeaseNotFound) || errors.Is(wrapped, Reason("")) {
		t.Errorf("%v is not what it is", err)
	}
	var said *Error
	if !errors.As(wrapped, &said) {
		t.Fatalf("%T is no *Error", err)
	}
	if needed, ok := said.Number("needed"); !ok || needed != 7 {
		t.Errorf("needed is %d, %t", needed, ok)
	}
	if _, ok := said.Number("free"); ok {
		t.Error("there is a number that nobody gave")
	}
	if said.Domain != "cache.quire.dev" || said.Error() != "OUT_OF_BLOCKS: why" || status.Code(wrapped) != codes.ResourceExhausted {
		t.Errorf("%#v", said)
	}
	again := errorOfCall(said.GRPCStatus().Err())
	if !errors.Is(again, ErrOutOfBlocks) {
		t.Errorf("the status made of it says %v", again)
	}
}

func TestAnErrorSaysWhenToAskAgain(t *testing.T) {
	info := &errdetails.ErrorInfo{Reason: "OVERLOADED", Domain: "cache.quire.dev"}
	delay := durationpb.New(100 * time.Millisecond)
	var called, silent, again *Error
	if !errors.As(errorOfCall(refused(t, codes.ResourceExhausted, info, &errdetails.RetryInfo{RetryDelay: delay})), &called) ||
		called.Reason != ErrOverloaded || called.RetryAfter == nil || *called.RetryAfter != 100*time.Millisecond {
		t.Errorf("%#v", called)
	}
	if !errors.As(errorOfCall(called.GRPCStatus().Err()), &again) || again.RetryAfter == nil || *again.RetryAfter != *called.RetryAfter {
		t.Errorf("the status made of it says %#v", again)
	}
	if !errors.As(errorOfCall(refused(t, codes.ResourceExhausted, info)), &silent) || silent.RetryAfter != nil {
		t.Errorf("%#v", silent)
	}
	for _, said := range []*durationpb.Duration{nil, {}, delay} {
		answered := errorOfAnswer(&cachev1.Error{Reason: "OVERLOADED", RetryDelay: said}, true)
		if (said == nil) != (answered.RetryAfter == nil) || said != nil && *answered.RetryAfter != said.AsDuration() {
			t.Errorf("%v became %v", said, answered.RetryAfter)
		}
	}
}

func TestAStatusWithoutDetailsHasNoReason(t *testing.T) {
	for code, target := range map[codes.Code]error{
		codes.DeadlineExceeded: context.DeadlineExceeded,
		codes.Canceled:         context.Canceled,
		codes.Unavailable:      ErrUnavailable,
	} {
		err := errorOfCall(status.Error(code, "why"))
		if !errors.Is(err, target) {
			t.Errorf("%v is not %v", err, target)
		}
		var said *Error
		if !errors.As(err, &said) || said.Reason != "" || said.Error() != code.String()+": why" {
			t.Errorf("%#v", said)
		}
	}
}

func TestDrainingIsUnavailableToo(t *testing.T) {
	err := errorOfCall(refused(t, codes.Unavailable, &errdetails.ErrorInfo{Reason: "SHUTTING_DOWN"}))
	if !errors.Is(err, ErrShuttingDown) || !errors.Is(err, ErrUnavailable) {
		t.Error(err)
	}
}

func TestWhatIsNoErrorStays(t *testing.T) {
	if errorOfCall(nil) != nil || errorOfCall(io.EOF) != io.EOF || RefusalError(nil) != nil {
		t.Error("nil or io.EOF has become something else")
	}
}

func TestARefusalIsAnError(t *testing.T) {
	err := RefusalError(&cachev1.Refusal{Error: &cachev1.Error{
		Code: int32(codes.NotFound), Reason: "SEQUENCE_NOT_FOUND", Message: "no sequence 3", Metadata: map[string]string{"sequence_id": "3"}}})
	var said *Error
	if !errors.Is(err, ErrSequenceNotFound) || !errors.As(err, &said) || said.Code != codes.NotFound || said.InAnswer {
		t.Errorf("%#v", err)
	}
}
