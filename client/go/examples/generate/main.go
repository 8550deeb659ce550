// Generate writes the most probable text after a prompt. It drives both services
// itself: takes a lease, plans each step at cachemgr, sends it to the worker, and
// stays one step ahead, because a plan needs no token of the step before.
//
//	go run ./examples/generate -cachemgr unix:/run/quire/cachemgr.sock "The default value"
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/quire-kv/quire/client/go/examples/internal/vocabulary"
	"github.com/quire-kv/quire/client/go/quire"
	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
	computev1 "github.com/quire-kv/quire/client/go/quire/compute/v1"
)

const (
	sequenceID       = 1 // the client's own choice, unique in its lease
	maxStepsInFlight = 2
)

type settings struct {
	cachemgr  string
	pool      string
	tokens    string
	maxTokens int
	idsOnly   bool
	prompt    string
}

func main() {
	var chosen settings
	flag.StringVar(&chosen.cachemgr, "cachemgr", "unix:/run/quire/cachemgr.sock", "`address` of cachemgr")
	flag.StringVar(&chosen.pool, "pool", "", "`name` of the pool; default: the only one")
	flag.StringVar(&chosen.tokens, "tokens", "", "the prompt as token `ids`, separated by commas")
	flag.IntVar(&chosen.maxTokens, "max-tokens", 64, "most `tokens` to generate")
	flag.BoolVar(&chosen.idsOnly, "ids", false, "write token ids instead of text")
	flag.Parse()
	chosen.prompt = flag.Arg(0)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, chosen, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, chosen settings, out io.Writer) (err error) {
	client, err := quire.Dial(chosen.cachemgr)
	if err != nil {
		return err
	}
	defer client.Close()
	lease, err := client.CreateLease(ctx, quire.LeaseOptions{Pool: chosen.pool})
	if err != nil {
		return err
	}
	defer func() { // also after Ctrl-C, so that the blocks come back at once
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		err = errors.Join(err, lease.Delete(ctx))
	}()
	worker, err := quire.DialWorker(lease.WorkerAddress())
	if err != nil {
		return err
	}
	defer worker.Close()
	model, err := worker.Service.GetModel(ctx, &computev1.GetModelRequest{})
	if err != nil {
		return err
	}
	prompt, text, err := chosen.read(model)
	if err != nil {
		return err
	}
	return generate(lease.Context(), lease, worker, model, prompt, chosen.maxTokens, func(token int32) {
		fmt.Fprint(out, text(token))
	})
}

// read returns the prompt's tokens, and how to write a token.
func (s settings) read(model *computev1.GetModelResponse) ([]int32, func(int32) string, error) {
	asID := func(token int32) string { return fmt.Sprintln(token) }
	if s.tokens != "" {
		tokens, err := parse(s.tokens)
		if err != nil || s.idsOnly {
			return tokens, asID, err
		}
		known, err := vocabulary.Load(model.GetTokenizer())
		if err != nil {
			return nil, nil, err
		}
		return tokens, known.Text, nil
	}
	known, err := vocabulary.Load(model.GetTokenizer())
	if err != nil {
		return nil, nil, err
	}
	tokens, err := known.Tokens(s.prompt)
	if s.idsOnly {
		return tokens, asID, err
	}
	return tokens, known.Text, err
}

func parse(list string) ([]int32, error) {
	var tokens []int32
	for word := range strings.SplitSeq(list, ",") {
		token, err := strconv.ParseInt(strings.TrimSpace(word), 10, 32)
		if err != nil {
			return nil, err
		}
		tokens = append(tokens, int32(token))
	}
	return tokens, nil
}

// generation is one sequence on its way.
type generation struct {
	plans       *quire.PlanStream
	steps       *quire.StepStream
	model       *computev1.GetModelResponse
	tokens      []int32 // the prompt's, then those sampled and seen
	promptCount int
	planned     int // tokens with KV that the steps sent so far compute
	promised    int // tokens that the steps sent so far sample
}

// generate calls emit with each token, until the text ends or there are enough.
func generate(ctx context.Context, lease *quire.Lease, worker *quire.Worker, model *computev1.GetModelResponse,
	prompt []int32, maxTokens int, emit func(int32)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends both streams
	plans, err := lease.OpenPlans(ctx)
	if err != nil {
		return err
	}
	steps, err := worker.OpenSteps(ctx)
	if err != nil {
		return err
	}
	g := &generation{plans: plans, steps: steps, model: model, tokens: prompt, promptCount: len(prompt)}
	for ended, inFlight := false, 0; ; {
		for ; !ended && inFlight < maxStepsInFlight && g.promised < maxTokens; inFlight++ {
			if err := g.sendStep(); err != nil {
				return err
			}
		}
		if inFlight == 0 {
			return nil
		}
		answer, err := steps.Recv()
		if err != nil {
			return err
		}
		inFlight--
		for _, token := range answer.GetSampledTokenIds() {
			if ended = ended || slices.Contains(model.GetEndTokenIds(), token); !ended {
				g.tokens = append(g.tokens, token)
				emit(token)
			}
		}
	}
}

// sendStep plans the sequence's next step and sends it to the worker.
func (g *generation) sendStep() error {
	if err := g.plans.Send(g.nextPlan()); err != nil && !errors.Is(err, io.EOF) { // io.EOF: Recv says why
		return err
	}
	plan, err := g.plans.Recv()
	if err != nil {
		return err
	}
	if refusals := plan.GetRefusals(); len(refusals) > 0 {
		return quire.RefusalError(refusals[0]) // the lease ends with us, so its step need not be sent
	}
	inputs, err := quire.Inputs(plan, func(int32) []int32 { return g.tokens })
	if err != nil {
		return err
	}
	g.planned = int(plan.GetRunStarts()[0] + plan.GetRunTokenCounts()[0])
	if g.planned >= g.promptCount {
		g.promised++
	}
	return g.steps.Send(&computev1.RunStepRequest{Grant: plan.GetGrant(), Inputs: inputs})
}

// nextPlan admits the prompt first; then goes on with what is left of it, if it
// does not fit in one step, and after that with one token at a time.
func (g *generation) nextPlan() *cachev1.PlanStepRequest {
	if g.planned == 0 {
		admission := &cachev1.Admission{
			SequenceId: sequenceID, TokenIds: g.tokens, MaxComputeTokenCount: g.model.GetMaxStepTokens()}
		return &cachev1.PlanStepRequest{Admissions: []*cachev1.Admission{admission}}
	}
	count := min(max(int32(g.promptCount-g.planned), 1), g.model.GetMaxStepTokens())
	return &cachev1.PlanStepRequest{
		Extends: &cachev1.Extends{SequenceIds: []int32{sequenceID}, TokenCounts: []int32{count}}}
}
