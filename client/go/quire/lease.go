package quire

import (
	"context"
	"errors"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
)

// errDeleted is the cause of a lease's context after Delete.
var errDeleted = errors.New("quire: the lease was deleted")

// Lease is the right to hold blocks of one pool, kept alive in the background.
// It is safe for concurrent use, but steps of a lease run in the order they were
// planned: two goroutines that plan have to agree on it.
type Lease struct {
	client *Client
	id     string
	pool   string
	term   int64
	ttl    time.Duration

	ctx     context.Context
	end     context.CancelCauseFunc
	stopped chan struct{} // closed when the keep-alive has ended

	mu            sync.Mutex
	epoch         int64
	geometry      *cachev1.PoolGeometry
	workerAddress string
	renewed       time.Time // when the last call that renewed it was sent
}

func newLease(ctx context.Context, client *Client, granted *cachev1.CreateLeaseResponse, ttl time.Duration, asked time.Time) *Lease {
	lease := &Lease{
		client:        client,
		id:            granted.GetLeaseId(),
		pool:          granted.GetPool(),
		term:          granted.GetTerm(),
		ttl:           ttl,
		stopped:       make(chan struct{}),
		epoch:         granted.GetEpoch(),
		geometry:      granted.GetGeometry(),
		workerAddress: granted.GetWorkerAddress(),
		renewed:       asked,
	}
	lease.ctx, lease.end = context.WithCancelCause(ctx)
	go lease.keepAlive()
	return lease
}

// ID names the lease in calls. Whoever knows it may use the lease.
func (l *Lease) ID() string { return l.id }

// Pool is the name of the pool the lease is for.
func (l *Lease) Pool() string { return l.pool }

// Term is the incarnation of the cachemgr that granted the lease.
func (l *Lease) Term() int64 { return l.term }

// Epoch is the incarnation of the pool's memory that the lease's plans are for.
func (l *Lease) Epoch() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.epoch
}

// Geometry is the pool's sizes and identity. Not to be changed.
func (l *Lease) Geometry() *cachev1.PoolGeometry {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.geometry
}

// WorkerAddress is where the pool's worker is reached, for DialWorker.
func (l *Lease) WorkerAddress() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.workerAddress
}

// Context is done when the lease is not kept any more. Then context.Cause says
// why: an error that is ErrLeaseNotFound if the server said that it is gone, or
// what ended the context given to CreateLease.
func (l *Lease) Context() context.Context { return l.ctx }

// Plan plans one step. The request's lease and epoch are filled in where they
// are empty; the request itself is not changed. See CacheService.PlanStep.
func (l *Lease) Plan(ctx context.Context, request *cachev1.PlanStepRequest) (*cachev1.PlanStepResponse, error) {
	asked := time.Now()
	planned, err := l.client.Service.PlanStep(ctx, l.filled(request))
	if err != nil {
		return nil, l.noted(err)
	}
	l.renewedAt(asked)
	return planned, nil
}

// FollowEpoch goes on with the pool's present memory after ErrEpochChanged, and
// says whether it is a new one. Then all sequences are gone and the worker may be
// at another address.
func (l *Lease) FollowEpoch(ctx context.Context) (bool, error) {
	answer, err := l.client.Service.GetPool(ctx, &cachev1.GetPoolRequest{Pool: l.pool})
	if err != nil {
		return false, err
	}
	pool := answer.GetPool()
	l.mu.Lock()
	defer l.mu.Unlock()
	changed := pool.GetEpoch() != l.epoch
	l.epoch, l.geometry, l.workerAddress = pool.GetEpoch(), pool.GetGeometry(), pool.GetWorkerAddress()
	return changed, nil
}

// Delete gives the lease and all of its blocks back, and ends the keep-alive.
// Doing it twice is fine. If it fails the lease runs out by itself.
func (l *Lease) Delete(ctx context.Context) error {
	l.end(errDeleted)
	<-l.stopped
	_, err := l.client.Service.DeleteLease(ctx, &cachev1.DeleteLeaseRequest{LeaseId: l.id})
	return err
}

// filled is a plan of this lease.
func (l *Lease) filled(request *cachev1.PlanStepRequest) *cachev1.PlanStepRequest {
	if request.GetLeaseId() != "" && request.GetEpoch() != 0 {
		return request
	}
	filled := proto.CloneOf(request)
	if filled.LeaseId == "" {
		filled.LeaseId = l.id
	}
	if filled.Epoch == 0 {
		filled.Epoch = l.Epoch()
	}
	return filled
}

func (l *Lease) renewedAt(when time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if when.After(l.renewed) {
		l.renewed = when
	}
}

// noted ends the lease's context if the error says that the lease is gone, and returns the error.
func (l *Lease) noted(err error) error {
	if errors.Is(err, ErrLeaseNotFound) {
		l.end(err)
	}
	return err
}

// keepAlive renews the lease a third of its ttl after the last call that did.
func (l *Lease) keepAlive() {
	defer close(l.stopped)
	timer := time.NewTimer(l.untilDue())
	defer timer.Stop()
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-timer.C:
		}
		due := l.untilDue()
		if due <= 0 {
			due = l.renew()
		}
		timer.Reset(due)
	}
}

func (l *Lease) untilDue() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Until(l.renewed.Add(l.ttl / 3))
}

// renew asks once, and says how long to wait until the next look. A server that is away may come back before the lease
// ends; only its word ends the lease.
func (l *Lease) renew() time.Duration {
	ctx, cancel := context.WithTimeout(l.ctx, l.ttl/3)
	defer cancel()
	asked := time.Now()
	if _, err := l.client.Service.RenewLease(ctx, &cachev1.RenewLeaseRequest{LeaseId: l.id}); err != nil {
		_ = l.noted(err)
		return l.ttl / 20
	}
	l.renewedAt(asked)
	return l.untilDue()
}
