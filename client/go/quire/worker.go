package quire

import (
	"context"
	"fmt"

	"google.golang.org/grpc"

	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
	computev1 "github.com/quire-kv/quire/client/go/quire/compute/v1"
)

// Worker is a connection to one worker. It is safe for concurrent use, but steps
// of a lease have to be sent in the order of their numbers.
type Worker struct {
	// Service has every call of the contract.
	Service computev1.WorkerServiceClient

	connection *grpc.ClientConn
}

// DialWorker makes a client of the worker at "unix:/path" or "host:port", as in
// Lease.WorkerAddress. It does not wait for a connection.
func DialWorker(address string, options ...Option) (*Worker, error) {
	connection, err := dial(address, options)
	if err != nil {
		return nil, err
	}
	return &Worker{Service: computev1.NewWorkerServiceClient(connection), connection: connection}, nil
}

// Close ends the connection and all calls on it.
func (w *Worker) Close() error { return w.connection.Close() }

// Run runs one planned step and returns when its tokens are sampled. Never
// repeat it: a step number is accepted once. See WorkerService.RunStep.
func (w *Worker) Run(ctx context.Context, step *computev1.RunStepRequest) (*computev1.RunStepResponse, error) {
	return w.Service.RunStep(ctx, step)
}

// Inputs are what a planned step needs to be told: of each run that the plan
// wants tokens for, those that it computes. tokens returns all tokens of a
// sequence. It fails if the plan is for tokens that the sequence does not have.
func Inputs(plan *cachev1.PlanStepResponse, tokens func(sequence int32) []int32) ([]*computev1.SequenceInput, error) {
	sequences, starts, counts := plan.GetRunSequenceIds(), plan.GetRunStarts(), plan.GetRunTokenCounts()
	inputs := make([]*computev1.SequenceInput, 0, len(plan.GetGivenRunIndexes()))
	for _, run := range plan.GetGivenRunIndexes() {
		if run < 0 || int(run) >= min(len(sequences), len(starts), len(counts)) {
			return nil, fmt.Errorf("quire: the plan wants tokens for run %d, which it does not have", run)
		}
		sequence, start := sequences[run], int(starts[run])
		known, end := tokens(sequence), start+int(counts[run])
		if start < 0 || end < start || end > len(known) {
			return nil, fmt.Errorf("quire: the plan wants tokens %d to %d of sequence %d, which has %d",
				start, end, sequence, len(known))
		}
		inputs = append(inputs, &computev1.SequenceInput{SequenceId: sequence, TokenIds: known[start:end]})
	}
	return inputs, nil
}
