package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
)

// Admissions of one plan at most, as an engine limits the prompt tokens of a step.
const maxAdmissions = 2

const leaseSeconds = 60

// The pause before a plan that cachemgr put off is sent again.
const putOff = time.Millisecond

// Engine keeps a batch of sequences running in one pool: each plan extends all of them by a token, releases those that
// have ended, and admits the next requests of the trace in their place.
type Engine struct {
	stub     cachev1.CacheServiceClient
	worker   *Worker
	requests []Request
	next     int
	settings Settings
	measures atomic.Bool

	stream   cachev1.CacheService_PlanStepsClient
	leaseID  string
	epoch    int64
	numPlans int64
	lastID   int32
	left     map[int32]int // tokens that a running sequence still generates
	released []int32

	figures sync.Mutex
	found   Result
}

func newEngine(stub cachev1.CacheServiceClient, worker *Worker, requests []Request, first int, settings Settings) *Engine {
	return &Engine{stub: stub, worker: worker, requests: requests, next: first, settings: settings, left: map[int32]int{}}
}

// run plans steps until the context ends; isFull is called once, when the batch is running.
func (e *Engine) run(ctx context.Context, delay time.Duration, isFull func()) error {
	lease, err := e.stub.CreateLease(ctx, &cachev1.CreateLeaseRequest{
		Pool: e.worker.pool, Ttl: durationpb.New(leaseSeconds * time.Second),
	})
	if err != nil {
		return err
	}
	e.leaseID, e.epoch = lease.LeaseId, lease.Epoch
	if e.stream, err = e.stub.PlanSteps(ctx); err != nil {
		return err
	}
	fill := sync.OnceFunc(isFull)
	// One step is with the worker while the next is planned.
	steps, ended := make(chan *cachev1.SignedGrant, 1), make(chan error, 1)
	go func() {
		for grant := range steps {
			ended <- e.worker.run(grant)
		}
	}()
	defer close(steps)
	due, inFlight := time.Now().Add(delay), false
	for ctx.Err() == nil {
		isFilling := len(e.left) < e.settings.Batch && !e.measures.Load()
		if e.settings.Interval > 0 && !isFilling {
			due = e.awaitTurn(due)
		}
		grant, err := e.step()
		if err != nil {
			return err
		}
		if inFlight {
			if err := <-ended; err != nil {
				return err
			}
		}
		steps <- grant
		inFlight = true
		if len(e.left) >= e.settings.Batch {
			fill()
		}
	}
	return ctx.Err()
}

// awaitTurn waits for the engine's next moment and returns the one after it. A late engine goes on at once.
func (e *Engine) awaitTurn(due time.Time) time.Time {
	now := time.Now()
	if wait := due.Sub(now); wait > 0 {
		time.Sleep(wait)
		return due.Add(e.settings.Interval)
	}
	if now.Sub(due) > e.settings.Interval {
		e.count(func(found *Result) { found.NumLate++ })
		return now.Add(e.settings.Interval)
	}
	return due.Add(e.settings.Interval)
}

// step plans one step and returns its grant.
func (e *Engine) step() (*cachev1.SignedGrant, error) {
	plan := &cachev1.PlanStepRequest{LeaseId: e.leaseID, Epoch: e.epoch, ReleaseSequenceIds: e.released}
	e.released = nil
	extended := make([]int32, 0, len(e.left))
	for id, left := range e.left {
		if left == 0 {
			plan.ReleaseSequenceIds = append(plan.ReleaseSequenceIds, id)
			delete(e.left, id)
			continue
		}
		extended = append(extended, id)
	}
	slices.Sort(extended)
	if len(extended) > 0 {
		counts := make([]int32, len(extended))
		for index, id := range extended {
			counts[index] = 1
			e.left[id]--
		}
		plan.Extends = &cachev1.Extends{SequenceIds: extended, TokenCounts: counts}
	}
	prompts := map[int32]int{}
	for range min(maxAdmissions, e.settings.Batch-len(e.left)) {
		request := e.requests[e.next%len(e.requests)]
		e.lastID++
		tokens := request.tokens(int64(e.next))
		plan.Admissions = append(plan.Admissions, &cachev1.Admission{SequenceId: e.lastID, TokenIds: tokens})
		prompts[e.lastID] = len(tokens)
		e.left[e.lastID] = request.OutputLength
		e.next++
	}
	answer, taken, err := e.ask(plan)
	if err != nil {
		return nil, err
	}
	for _, refusal := range answer.Refusals {
		if refusal.Error.Reason != "OUT_OF_BLOCKS" {
			return nil, fmt.Errorf("pool %s: refused: %v", e.worker.pool, refusal)
		}
		// A request that has no room is left out; a running one ends early.
		if _, isNew := prompts[refusal.SequenceId]; !isNew {
			e.released = append(e.released, refusal.SequenceId)
		}
		delete(e.left, refusal.SequenceId)
	}
	e.count(func(found *Result) {
		found.NumRefused += int64(len(answer.Refusals))
		if len(plan.Admissions) == 0 {
			found.DecodeUs = append(found.DecodeUs, taken.Microseconds())
			return
		}
		found.AdmissionUs = append(found.AdmissionUs, taken.Microseconds())
		for index, id := range answer.AdmittedSequenceIds {
			found.PromptTokens += int64(prompts[id])
			found.CachedTokens += int64(answer.AdmittedCachedTokenCounts[index])
		}
	})
	return answer.Grant, nil
}

// ask sends a plan until the lease has no longer too many steps, and returns the answer and the time it took in all.
func (e *Engine) ask(plan *cachev1.PlanStepRequest) (*cachev1.PlanStepResponse, time.Duration, error) {
	e.numPlans++
	plan.RequestId = strconv.FormatInt(e.numPlans, 10)
	began := time.Now()
	for {
		if err := e.stream.Send(&cachev1.PlanStepsRequest{Plan: plan}); err != nil {
			return nil, 0, err
		}
		received, err := e.stream.Recv()
		if err != nil {
			return nil, 0, err
		}
		switch answer := received.Answer.(type) {
		case *cachev1.PlanStepsResponse_Plan:
			return answer.Plan, time.Since(began), nil
		case *cachev1.PlanStepsResponse_Error:
			if answer.Error.Reason != "TOO_MANY_STEPS" {
				return nil, 0, fmt.Errorf("pool %s: %v", e.worker.pool, answer.Error)
			}
			e.count(func(found *Result) { found.NumPutOff++ })
			time.Sleep(putOff)
		default:
			return nil, 0, errors.New("an empty answer")
		}
	}
}

// count changes the figures while they count.
func (e *Engine) count(change func(*Result)) {
	if e.measures.Load() {
		e.figures.Lock()
		defer e.figures.Unlock()
		change(&e.found)
	}
}

func (e *Engine) addTo(result *Result) {
	e.figures.Lock()
	defer e.figures.Unlock()
	result.DecodeUs = append(result.DecodeUs, e.found.DecodeUs...)
	result.AdmissionUs = append(result.AdmissionUs, e.found.AdmissionUs...)
	result.PromptTokens += e.found.PromptTokens
	result.CachedTokens += e.found.CachedTokens
	result.NumRefused += e.found.NumRefused
	result.NumPutOff += e.found.NumPutOff
	result.NumLate += e.found.NumLate
}
