package main

import (
	"context"
	"fmt"
	"sync"

	"google.golang.org/protobuf/proto"

	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
)

// Worker has a pool's place in the protocol, and computes nothing: every step is reported at once, as computed.
type Worker struct {
	pool      string
	numBlocks int
	attached  chan struct{}

	sending    sync.Mutex
	stream     cachev1.CacheService_AttachPoolClient
	numReports int64
}

func newWorker(pool string, numBlocks int) *Worker {
	return &Worker{pool: pool, numBlocks: numBlocks, attached: make(chan struct{})}
}

// attach registers the pool and obeys cachemgr until the stream ends.
func (w *Worker) attach(ctx context.Context, stub cachev1.CacheServiceClient) error {
	stream, err := stub.AttachPool(ctx)
	if err != nil {
		return err
	}
	w.stream = stream
	registration := &cachev1.RegisterPool{
		Pool:          w.pool,
		Epoch:         1,
		WorkerAddress: "unix:/nowhere",
		Geometry: &cachev1.PoolGeometry{
			BlockSizeTokens:   16,
			BlockCount:        int32(w.numBlocks),
			BlockBytes:        65_536,
			MaxSequenceCount:  4_096,
			MaxSequenceTokens: 131_072,
			VocabularySize:    vocabulary,
			Model:             "none",
			ModelFingerprint:  "none",
		},
	}
	if err := w.say(&cachev1.AttachPoolRequest{Message: &cachev1.AttachPoolRequest_RegisterPool{RegisterPool: registration}}); err != nil {
		return err
	}
	for {
		order, err := stream.Recv()
		if err != nil {
			return fmt.Errorf("worker %s: %w", w.pool, err)
		}
		if err := w.obey(order); err != nil {
			return err
		}
	}
}

func (w *Worker) obey(order *cachev1.AttachPoolResponse) error {
	switch message := order.Message.(type) {
	case *cachev1.AttachPoolResponse_Attached:
		close(w.attached)
		return nil
	case *cachev1.AttachPoolResponse_OpenLease:
		opened := &cachev1.LeaseOpened{LeaseId: message.OpenLease.LeaseId}
		return w.say(&cachev1.AttachPoolRequest{Message: &cachev1.AttachPoolRequest_LeaseOpened{LeaseOpened: opened}})
	case *cachev1.AttachPoolResponse_FenceLease:
		fenced := &cachev1.LeaseFenced{LeaseId: message.FenceLease.LeaseId}
		return w.say(&cachev1.AttachPoolRequest{Message: &cachev1.AttachPoolRequest_LeaseFenced{LeaseFenced: fenced}})
	case *cachev1.AttachPoolResponse_ReportsAcknowledged:
		return nil
	default:
		return fmt.Errorf("worker %s: unexpected order %T", w.pool, message)
	}
}

func (w *Worker) say(message *cachev1.AttachPoolRequest) error {
	w.sending.Lock()
	defer w.sending.Unlock()
	return w.stream.Send(message)
}

// run reports a granted step. It returns when the report is written.
func (w *Worker) run(signed *cachev1.SignedGrant) error {
	var grant cachev1.StepGrant
	if err := proto.Unmarshal(signed.Grant, &grant); err != nil {
		return err
	}
	report := &cachev1.StepReport{
		LeaseId:     grant.LeaseId,
		StepNumber:  grant.StepNumber,
		Outcome:     cachev1.StepOutcome_STEP_OUTCOME_COMPUTED,
		SequenceIds: grant.RunSequenceIds,
	}
	for index, id := range grant.RunSequenceIds {
		end := grant.RunStarts[index] + grant.RunTokenCounts[index]
		report.ComputedTokenCounts = append(report.ComputedTokenCounts, end)
		if grant.RunSamples[index] {
			report.SampledSequenceIds = append(report.SampledSequenceIds, id)
			report.SampledTokenIds = append(report.SampledTokenIds, int32(mix(uint64(id)<<32|uint64(end))%vocabulary))
		}
	}
	w.sending.Lock()
	defer w.sending.Unlock()
	w.numReports++
	report.ReportNumber = w.numReports
	return w.stream.Send(&cachev1.AttachPoolRequest{Message: &cachev1.AttachPoolRequest_StepReport{StepReport: report}})
}
