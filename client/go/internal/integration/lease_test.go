package integration

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"github.com/quire-kv/quire/client/go/quire"
	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
	computev1 "github.com/quire-kv/quire/client/go/quire/compute/v1"
)

func createLease(t *testing.T, client *quire.Client, ctx context.Context, wanted quire.LeaseOptions) *quire.Lease {
	t.Helper()
	lease, err := client.CreateLease(ctx, wanted)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lease.Delete(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return lease
}

func dialWorker(t *testing.T, lease *quire.Lease, options ...quire.Option) *quire.Worker {
	t.Helper()
	worker, err := quire.DialWorker(lease.WorkerAddress(), options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { worker.Close() })
	return worker
}

func admission(sequence int32, tokens ...int32) *cachev1.PlanStepRequest {
	return &cachev1.PlanStepRequest{Admissions: []*cachev1.Admission{{SequenceId: sequence, TokenIds: tokens}}}
}

func isHeld(t *testing.T, client *quire.Client, lease *quire.Lease) bool {
	t.Helper()
	answer, err := client.Service.ListLeases(context.Background(), &cachev1.ListLeasesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, listed := range answer.GetLeases() {
		if listed.GetLeaseIdPrefix() == lease.ID()[:8] {
			return true
		}
	}
	return false
}

func TestALeaseIsKeptAliveUntilItsContextEnds(t *testing.T) {
	client := needFleet(t)
	ctx, cancel := context.WithCancel(t.Context())
	lease := createLease(t, client, ctx, quire.LeaseOptions{Pool: "a", TTL: time.Second})
	time.Sleep(2500 * time.Millisecond) // longer than it lasts by itself
	if !isHeld(t, client, lease) || lease.Context().Err() != nil {
		t.Fatal("it was not kept alive")
	}
	cancel()
	awaitThat(t, "the lease's context is done", func() bool { return lease.Context().Err() != nil })
	if cause := context.Cause(lease.Context()); !errors.Is(cause, context.Canceled) {
		t.Error(cause)
	}
	awaitThat(t, "the lease has run out", func() bool { return !isHeld(t, client, lease) })
	if _, err := lease.Plan(t.Context(), admission(1, 5)); !errors.Is(err, quire.ErrLeaseNotFound) {
		t.Error(err)
	}
}

func TestALostLeaseEndsItsContext(t *testing.T) {
	client := needFleet(t)
	lease := createLease(t, client, t.Context(), quire.LeaseOptions{Pool: "a", TTL: time.Second})
	if _, err := client.Service.DeleteLease(t.Context(), &cachev1.DeleteLeaseRequest{LeaseId: lease.ID()}); err != nil {
		t.Fatal(err)
	}
	awaitThat(t, "the lease's context is done", func() bool { return lease.Context().Err() != nil })
	if cause := context.Cause(lease.Context()); !errors.Is(cause, quire.ErrLeaseNotFound) {
		t.Error(cause)
	}
}

func TestADeletedLeaseIsGoneAtOnce(t *testing.T) {
	client := needFleet(t)
	lease := createLease(t, client, t.Context(), quire.LeaseOptions{Pool: "a"})
	for range 2 {
		if err := lease.Delete(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if lease.Context().Err() == nil {
		t.Error("its context lives")
	}
	if _, err := lease.Plan(t.Context(), admission(1, 5)); !errors.Is(err, quire.ErrLeaseNotFound) {
		t.Error(err)
	}
}

func TestARequestIDMakesTheCallIdempotent(t *testing.T) {
	client := needFleet(t)
	wanted := quire.LeaseOptions{Pool: "a", RequestID: strconv.FormatUint(rand.Uint64(), 36)}
	first, second := createLease(t, client, t.Context(), wanted), createLease(t, client, t.Context(), wanted)
	if first.ID() != second.ID() {
		t.Error("two leases")
	}
	wanted.Pool = "b"
	if _, err := client.CreateLease(t.Context(), wanted); !errors.Is(err, quire.ErrRequestIDReused) {
		t.Error(err)
	}
}

func TestErrorsHaveReasonAndNumbers(t *testing.T) {
	client := needFleet(t)
	_, err := client.CreateLease(t.Context(), quire.LeaseOptions{Pool: "nowhere"})
	var said *quire.Error
	if !errors.Is(err, quire.ErrPoolNotFound) || !errors.As(err, &said) || said.Metadata["pool"] != "nowhere" ||
		said.Domain != "cache.quire.dev" || said.InAnswer {
		t.Errorf("%#v", err)
	}
	lease := createLease(t, client, t.Context(), quire.LeaseOptions{Pool: "a"})
	worker := dialWorker(t, lease)
	_, err = worker.Service.ChecksumBlocks(t.Context(), &computev1.ChecksumBlocksRequest{BlockIds: []int32{64}})
	if !errors.Is(err, quire.ErrBlockOutOfRange) || !errors.As(err, &said) || said.Domain != "compute.quire.dev" {
		t.Errorf("%#v", err)
	}
	if limit, ok := said.Number("limit"); !ok || limit != 63 {
		t.Error(said.Metadata)
	}
	plan, err := lease.Plan(t.Context(), admission(1))
	if err != nil {
		t.Fatal(err)
	}
	if err := quire.RefusalError(plan.GetRefusals()[0]); !errors.Is(err, quire.ErrEmptyPrompt) {
		t.Error(err)
	}
}

func TestADeadlineIsKept(t *testing.T) {
	needFleet(t)
	client := dial(t, quire.WithTimeout(time.Nanosecond))
	defer client.Close()
	if _, err := client.Service.ListPools(t.Context(), &cachev1.ListPoolsRequest{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second) // the caller's own is the one that counts
	defer cancel()
	if _, err := client.Service.ListPools(ctx, &cachev1.ListPoolsRequest{}); err != nil {
		t.Error(err)
	}
}

func TestAnErrorInAnAnswerDoesNotEndTheStream(t *testing.T) {
	client := needFleet(t)
	lease := createLease(t, client, t.Context(), quire.LeaseOptions{Pool: "a"})
	plans, err := lease.OpenPlans(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	stale := &cachev1.PlanStepRequest{Epoch: lease.Epoch() + 1}
	for _, request := range []*cachev1.PlanStepRequest{stale, admission(1, 5, 6, 7)} {
		if err := plans.Send(request); err != nil {
			t.Fatal(err)
		}
	}
	var said *quire.Error
	if _, err := plans.Recv(); !errors.Is(err, quire.ErrEpochChanged) || !errors.As(err, &said) || !said.InAnswer {
		t.Errorf("%#v", err)
	}
	plan, err := plans.Recv()
	if err != nil {
		t.Fatal(err)
	}
	steps, err := dialWorker(t, lease).OpenSteps(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	inputs, err := quire.Inputs(plan, func(int32) []int32 { return []int32{5, 6, 7} })
	if err != nil {
		t.Fatal(err)
	}
	forged := &cachev1.SignedGrant{Grant: plan.GetGrant().GetGrant(), Signature: make([]byte, 32)}
	for _, grant := range []*cachev1.SignedGrant{forged, plan.GetGrant()} {
		if err := steps.Send(&computev1.RunStepRequest{Grant: grant, Inputs: inputs}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := steps.Recv(); !errors.Is(err, quire.ErrBadSignature) || !errors.As(err, &said) || !said.InAnswer {
		t.Errorf("%#v", err)
	}
	answer, err := steps.Recv()
	if err != nil || len(answer.GetSampledTokenIds()) != 1 {
		t.Errorf("%v, %v", answer, err)
	}
}

func TestALeaseLivesOnInANewEpoch(t *testing.T) {
	client := needFleet(t)
	attach := func(epoch int64) (cachev1.CacheService_AttachPoolClient, context.CancelFunc) {
		ctx, cancel := context.WithCancel(t.Context())
		stream, err := client.Service.AttachPool(ctx)
		if err != nil {
			t.Fatal(err)
		}
		registration := &cachev1.RegisterPool{Pool: "none", Epoch: epoch, WorkerAddress: "nowhere:1", Geometry: &cachev1.PoolGeometry{
			BlockSizeTokens: 4, BlockCount: 9, BlockBytes: 1024, MaxSequenceCount: 4, MaxSequenceTokens: 24, VocabularySize: 100,
			Model: "none", ModelFingerprint: "none"}}
		said := &cachev1.AttachPoolRequest{Message: &cachev1.AttachPoolRequest_RegisterPool{RegisterPool: registration}}
		if err := stream.Send(said); err != nil {
			t.Fatal(err)
		}
		if heard, err := stream.Recv(); err != nil || heard.GetAttached() == nil {
			t.Fatal(heard, err)
		}
		go func() { // obeys every order
			for {
				heard, err := stream.Recv()
				if err != nil {
					return
				}
				if open := heard.GetOpenLease(); open != nil {
					opened := &cachev1.AttachPoolRequest_LeaseOpened{LeaseOpened: &cachev1.LeaseOpened{LeaseId: open.GetLeaseId()}}
					_ = stream.Send(&cachev1.AttachPoolRequest{Message: opened})
				}
				if fence := heard.GetFenceLease(); fence != nil {
					fenced := &cachev1.AttachPoolRequest_LeaseFenced{LeaseFenced: &cachev1.LeaseFenced{LeaseId: fence.GetLeaseId()}}
					_ = stream.Send(&cachev1.AttachPoolRequest{Message: fenced})
				}
			}
		}()
		return stream, cancel
	}
	_, detach := attach(1)
	lease := createLease(t, client, t.Context(), quire.LeaseOptions{Pool: "none"})
	if changed, err := lease.FollowEpoch(t.Context()); changed || err != nil {
		t.Error(changed, err)
	}
	detach()
	awaitThat(t, "the pool is detached", func() bool {
		answer, err := client.Service.GetPool(t.Context(), &cachev1.GetPoolRequest{Pool: "none"})
		return err == nil && !answer.GetPool().GetAttached()
	})
	_, detach = attach(2)
	defer func() { // the next tests must not find the lease
		if err := lease.Delete(t.Context()); err != nil {
			t.Error(err)
		}
		awaitThat(t, "the lease is fenced", func() bool { return !isHeld(t, client, lease) })
		detach()
	}()
	if _, err := lease.Plan(t.Context(), admission(1, 5)); !errors.Is(err, quire.ErrEpochChanged) {
		t.Error(err)
	}
	if changed, err := lease.FollowEpoch(t.Context()); !changed || err != nil || lease.Epoch() != 2 {
		t.Error(changed, err, lease.Epoch())
	}
	if _, err := lease.Plan(t.Context(), admission(1, 5)); err != nil {
		t.Error(err)
	}
}
