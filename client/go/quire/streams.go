package quire

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
	computev1 "github.com/quire-kv/quire/client/go/quire/compute/v1"
)

// PlanStream plans steps on one stream: Recv answers in the order of Send. One
// goroutine may send while another one receives.
type PlanStream struct {
	lease  *Lease
	stream grpc.BidiStreamingClient[cachev1.PlanStepsRequest, cachev1.PlanStepsResponse]
}

// OpenPlans opens a stream of plans, which ends with ctx.
func (l *Lease) OpenPlans(ctx context.Context) (*PlanStream, error) {
	stream, err := l.client.Service.PlanSteps(ctx)
	if err != nil {
		return nil, err
	}
	return &PlanStream{lease: l, stream: stream}, nil
}

// Send asks for a step. Lease and epoch are filled in as by Lease.Plan. io.EOF
// means that the stream has ended; Recv says why.
func (s *PlanStream) Send(request *cachev1.PlanStepRequest) error {
	return s.stream.Send(&cachev1.PlanStepsRequest{Plan: s.lease.filled(request)})
}

// Recv is the answer to the next plan. An *Error with InAnswer set is the
// answer to that plan alone, and the stream goes on; after any other error it
// has ended.
func (s *PlanStream) Recv() (*cachev1.PlanStepResponse, error) {
	answer, err := s.stream.Recv()
	if err != nil {
		return nil, err
	}
	switch answer := answer.GetAnswer().(type) {
	case *cachev1.PlanStepsResponse_Plan:
		return answer.Plan, nil
	case *cachev1.PlanStepsResponse_Error:
		return nil, s.lease.noted(errorOfAnswer(answer.Error, true))
	default:
		return nil, emptyAnswer()
	}
}

// CloseSend says that no more plans come. Answers to those sent still do.
func (s *PlanStream) CloseSend() error { return s.stream.CloseSend() }

// StepStream runs steps on one stream: Recv answers in the order of Send. One
// goroutine may send while another one receives.
type StepStream struct {
	stream grpc.BidiStreamingClient[computev1.RunStepsRequest, computev1.RunStepsResponse]
}

// OpenSteps opens a stream of steps, which ends with ctx.
func (w *Worker) OpenSteps(ctx context.Context) (*StepStream, error) {
	stream, err := w.Service.RunSteps(ctx)
	if err != nil {
		return nil, err
	}
	return &StepStream{stream: stream}, nil
}

// Send sends a step. io.EOF means that the stream has ended; Recv says why.
func (s *StepStream) Send(step *computev1.RunStepRequest) error {
	return s.stream.Send(&computev1.RunStepsRequest{Step: step})
}

// Recv is the answer to the next step. An *Error with InAnswer set is the
// answer to that step alone, and the stream goes on; after any other error it
// has ended.
func (s *StepStream) Recv() (*computev1.RunStepResponse, error) {
	answer, err := s.stream.Recv()
	if err != nil {
		return nil, err
	}
	switch answer := answer.GetAnswer().(type) {
	case *computev1.RunStepsResponse_Step:
		return answer.Step, nil
	case *computev1.RunStepsResponse_Error:
		return nil, errorOfAnswer(answer.Error, true)
	default:
		return nil, emptyAnswer()
	}
}

// CloseSend says that no more steps come. Answers to those sent still do.
func (s *StepStream) CloseSend() error { return s.stream.CloseSend() }

func emptyAnswer() *Error {
	return &Error{Code: codes.Internal, Message: "the server's answer is empty", InAnswer: true}
}
