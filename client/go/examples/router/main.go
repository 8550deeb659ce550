// Router sends each prompt to the pool that already holds most of it, and shows
// what that saved. It needs a cachemgr with two workers or more.
//
//	go run ./examples/router -cachemgr unix:/run/quire/cachemgr.sock [PROMPT...]
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"github.com/quire-kv/quire/client/go/examples/internal/vocabulary"
	"github.com/quire-kv/quire/client/go/quire"
	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
	computev1 "github.com/quire-kv/quire/client/go/quire/compute/v1"
)

// Two documents, about each of which something is asked three times.
var questions = func() []string {
	documents := []string{
		"The default value of this parameter is used when the function is called without an argument. ",
		"Each thread holds a lock while it reads the file, and gives it back when the file is closed. ",
	}
	var prompts []string
	for _, ask := range []string{"Note that", "In general", "If not"} {
		for _, document := range documents {
			prompts = append(prompts, strings.Repeat(document, 2)+ask)
		}
	}
	return prompts
}()

func main() {
	cachemgr := flag.String("cachemgr", "unix:/run/quire/cachemgr.sock", "`address` of cachemgr")
	maxTokens := flag.Int("max-tokens", 8, "most `tokens` to generate for each prompt")
	flag.Parse()
	prompts := flag.Args()
	if len(prompts) == 0 {
		prompts = questions
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, *cachemgr, prompts, *maxTokens, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "router:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, cachemgr string, prompts []string, maxTokens int, out io.Writer) (err error) {
	client, err := quire.Dial(cachemgr)
	if err != nil {
		return err
	}
	defer client.Close()
	router := &router{client: client, backends: map[string]*backend{}}
	defer func() { err = errors.Join(err, router.close(ctx)) }()
	for _, prompt := range prompts {
		if err := router.serve(ctx, prompt, maxTokens, out); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(router.backends)) {
		used := router.backends[name]
		fmt.Fprintf(out, "pool %s: %d prompts, %d of their %d tokens from the cache\n",
			name, used.promptCount, used.cachedCount, used.tokenCount)
	}
	return nil
}

// router has a lease on each pool that it has used.
type router struct {
	client   *quire.Client
	backends map[string]*backend // by pool
	words    *vocabulary.Vocabulary
}

// backend is a lease on a pool and the pool's worker.
type backend struct {
	lease  *quire.Lease
	worker *quire.Worker
	model  *computev1.GetModelResponse

	promptCount int // sequences are numbered by it
	tokenCount  int
	cachedCount int
}

// serve answers one prompt where it is answered with the least work.
func (r *router) serve(ctx context.Context, prompt string, maxTokens int, out io.Writer) error {
	tokens, err := r.tokens(ctx, prompt)
	if err != nil {
		return err
	}
	match, err := r.choose(ctx, tokens)
	if err != nil {
		return err
	}
	chosen, err := r.backend(ctx, match.GetPool())
	if err != nil {
		return err
	}
	cached, sampled, err := chosen.complete(ctx, tokens, maxTokens)
	if err != nil {
		return err
	}
	var text strings.Builder
	for _, token := range sampled {
		text.WriteString(r.words.Text(token))
	}
	fmt.Fprintf(out, "pool %s held %d of %d tokens, found %d: %q\n",
		match.GetPool(), match.GetCachedTokenCount(), len(tokens), cached, text.String())
	return nil
}

// choose asks what each pool holds of the tokens. Most wins; of equals the pool with more blocks without content.
func (r *router) choose(ctx context.Context, tokens []int32) (*cachev1.PrefixMatch, error) {
	answer, err := r.client.Service.LookupPrefix(ctx, &cachev1.LookupPrefixRequest{TokenIds: tokens})
	if err != nil {
		return nil, err
	}
	if len(answer.GetMatches()) == 0 {
		return nil, errors.New("there is no pool")
	}
	return slices.MaxFunc(answer.GetMatches(), func(a, b *cachev1.PrefixMatch) int {
		return cmp.Or(
			cmp.Compare(a.GetCachedTokenCount(), b.GetCachedTokenCount()),
			cmp.Compare(a.GetBlockCounts().GetFreeCount(), b.GetBlockCounts().GetFreeCount()),
		)
	}), nil
}

// tokens are a prompt's, by the tokenizer of any of the pools: they serve the same model.
func (r *router) tokens(ctx context.Context, prompt string) ([]int32, error) {
	if r.words == nil {
		pools, err := r.client.Service.ListPools(ctx, &cachev1.ListPoolsRequest{PageSize: 1})
		if err != nil {
			return nil, err
		}
		if len(pools.GetPools()) == 0 {
			return nil, errors.New("there is no pool")
		}
		first, err := r.backend(ctx, pools.GetPools()[0].GetName())
		if err != nil {
			return nil, err
		}
		if r.words, err = vocabulary.Load(first.model.GetTokenizer()); err != nil {
			return nil, err
		}
	}
	return r.words.Tokens(prompt)
}

// backend takes a lease on a pool the first time it is used.
func (r *router) backend(ctx context.Context, pool string) (*backend, error) {
	if known, ok := r.backends[pool]; ok {
		return known, nil
	}
	lease, err := r.client.CreateLease(ctx, quire.LeaseOptions{Pool: pool})
	if err != nil {
		return nil, err
	}
	worker, err := quire.DialWorker(lease.WorkerAddress())
	if err != nil {
		return nil, errors.Join(err, lease.Delete(ctx))
	}
	opened := &backend{lease: lease, worker: worker}
	r.backends[pool] = opened // from here on close ends it
	opened.model, err = worker.Service.GetModel(ctx, &computev1.GetModelRequest{})
	return opened, err
}

func (r *router) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	var failures []error
	for _, opened := range r.backends {
		failures = append(failures, opened.lease.Delete(ctx), opened.worker.Close())
	}
	return errors.Join(failures...)
}

// complete generates greedily, one step after the other, and returns how many of the prompt's tokens were in the cache
// and the tokens sampled.
func (b *backend) complete(ctx context.Context, prompt []int32, maxTokens int) (int, []int32, error) {
	b.promptCount++
	sequence, tokens, limit := int32(b.promptCount), slices.Clone(prompt), b.model.GetMaxStepTokens()
	plan, answer, err := b.step(ctx, tokens, &cachev1.PlanStepRequest{Admissions: []*cachev1.Admission{{
		SequenceId: sequence, TokenIds: tokens, MaxComputeTokenCount: limit}}})
	if err != nil {
		return 0, nil, err
	}
	cached := int(plan.GetAdmittedCachedTokenCounts()[0])
	b.tokenCount, b.cachedCount = b.tokenCount+len(prompt), b.cachedCount+cached
	for {
		sampled := answer.GetSampledTokenIds() // none while the prompt is not computed to its end
		tokens = append(tokens, sampled...)
		ended := len(sampled) > 0 && slices.Contains(b.model.GetEndTokenIds(), sampled[0])
		if ended || len(tokens) >= len(prompt)+maxTokens {
			return cached, tokens[len(prompt):], b.release(ctx, sequence)
		}
		computed := plan.GetRunStarts()[0] + plan.GetRunTokenCounts()[0]
		plan, answer, err = b.step(ctx, tokens, &cachev1.PlanStepRequest{Extends: &cachev1.Extends{
			SequenceIds: []int32{sequence}, TokenCounts: []int32{min(int32(len(tokens))-computed, limit)}}})
		if err != nil {
			return 0, nil, err
		}
	}
}

// step plans and runs one step of one sequence.
func (b *backend) step(ctx context.Context, tokens []int32, request *cachev1.PlanStepRequest) (
	*cachev1.PlanStepResponse, *computev1.RunStepResponse, error) {
	plan, err := b.lease.Plan(ctx, request)
	if err != nil {
		return nil, nil, err
	}
	if refusals := plan.GetRefusals(); len(refusals) > 0 {
		return nil, nil, quire.RefusalError(refusals[0])
	}
	inputs, err := quire.Inputs(plan, func(int32) []int32 { return tokens })
	if err != nil {
		return nil, nil, err
	}
	answer, err := b.worker.Run(ctx, &computev1.RunStepRequest{Grant: plan.GetGrant(), Inputs: inputs})
	return plan, answer, err
}

// release ends a sequence. Its content stays in the cache. The plan computes nothing, so its step is skipped.
func (b *backend) release(ctx context.Context, sequence int32) error {
	plan, err := b.lease.Plan(ctx, &cachev1.PlanStepRequest{ReleaseSequenceIds: []int32{sequence}})
	if err != nil {
		return err
	}
	_, err = b.worker.Run(ctx, &computev1.RunStepRequest{Grant: plan.GetGrant(), Skip: true})
	return err
}
