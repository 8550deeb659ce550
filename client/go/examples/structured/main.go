// Structured writes a text that matches a JSON schema after a prompt, and how
// probable the model finds the prompt. It shows what a request can ask of the
// worker: sampling parameters, a grammar and log-probabilities; and of cachemgr:
// what it does with the prefix cache. One step at a time, without streams.
//
//	go run ./examples/structured -cachemgr unix:/run/quire/cachemgr.sock -schema '{"type": "integer"}' "The default value is"
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
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/quire-kv/quire/client/go/examples/internal/vocabulary"
	"github.com/quire-kv/quire/client/go/quire"
	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
	computev1 "github.com/quire-kv/quire/client/go/quire/compute/v1"
)

const sequenceID = 1 // the client's own choice, unique in its lease

type settings struct {
	cachemgr    string
	pool        string
	schema      string
	temperature float64
	seed        int64
	maxTokens   int
	prompt      string
}

func main() {
	var chosen settings
	flag.StringVar(&chosen.cachemgr, "cachemgr", "unix:/run/quire/cachemgr.sock", "`address` of cachemgr")
	flag.StringVar(&chosen.pool, "pool", "", "`name` of the pool; default: the only one")
	flag.StringVar(&chosen.schema, "schema", `{"type": "object"}`, "a JSON `schema` that the text matches")
	flag.Float64Var(&chosen.temperature, "temperature", 0, "0: always the most probable token that is allowed")
	flag.Int64Var(&chosen.seed, "seed", 0, "fixes the random `numbers`")
	flag.IntVar(&chosen.maxTokens, "max-tokens", 64, "most `tokens` to generate")
	flag.Parse()
	chosen.prompt = flag.Arg(0)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, chosen, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "structured:", err)
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
	return generate(lease.Context(), lease, worker, chosen, out)
}

func generate(ctx context.Context, lease *quire.Lease, worker *quire.Worker, chosen settings, out io.Writer) error {
	model, err := worker.Service.GetModel(ctx, &computev1.GetModelRequest{})
	if err != nil {
		return err
	}
	known, err := vocabulary.Load(model.GetTokenizer())
	if err != nil {
		return err
	}
	tokens, err := known.Tokens(chosen.prompt)
	if err != nil {
		return err
	}
	grammar := &computev1.Grammar{Grammar: &computev1.Grammar_JsonSchema{JsonSchema: chosen.schema}}
	// A wrong schema is refused here, before anything is planned.
	if _, err := worker.Service.CheckGrammar(ctx, &computev1.CheckGrammarRequest{Grammar: grammar}); err != nil {
		return err
	}
	answer, err := step(ctx, lease, worker, admission(tokens), func(plan *cachev1.PlanStepResponse) ([]*computev1.SequenceInput, error) {
		return firstInputs(plan, tokens, chosen, grammar)
	})
	if err != nil {
		return err
	}
	for _, logprobs := range answer.GetPromptLogprobs() {
		for index, logprob := range logprobs.GetLogprobs() {
			fmt.Fprintf(out, "%.3f %q\n", logprob, known.Text(tokens[index+1]))
		}
	}
	for count := 1; ; count++ {
		if failures := answer.GetGrammarFailures(); len(failures) > 0 {
			return fmt.Errorf("the schema can't be followed any more: %s", failures[0].GetMessage())
		}
		token := answer.GetSampledTokenIds()[0]
		if slices.Contains(model.GetEndTokenIds(), token) || count > chosen.maxTokens {
			fmt.Fprintln(out)
			return nil
		}
		fmt.Fprint(out, known.Text(token))
		if answer, err = step(ctx, lease, worker, next(), nil); err != nil {
			return err
		}
	}
}

// admission is a plan for the whole prompt. All of it has to be computed for its
// log-probabilities, so nothing is taken from the prefix cache.
func admission(tokens []int32) *cachev1.PlanStepRequest {
	return &cachev1.PlanStepRequest{Admissions: []*cachev1.Admission{{
		SequenceId: sequenceID,
		TokenIds:   tokens,
		CacheUse:   cachev1.CacheUse_CACHE_USE_WRITE_ONLY,
	}}}
}

// next is a plan for one more token, the one that was sampled last.
func next() *cachev1.PlanStepRequest {
	return &cachev1.PlanStepRequest{
		Extends: &cachev1.Extends{SequenceIds: []int32{sequenceID}, TokenCounts: []int32{1}}}
}

// firstInputs are the prompt's tokens, how the worker samples from now on, and
// the prompt's log-probabilities: of the token that follows each one.
func firstInputs(plan *cachev1.PlanStepResponse, tokens []int32, chosen settings, grammar *computev1.Grammar) (
	[]*computev1.SequenceInput, error) {
	if count := int(plan.GetRunTokenCounts()[0]); count < len(tokens) {
		return nil, fmt.Errorf("the prompt has %d tokens, more than a step of %d", len(tokens), count)
	}
	inputs, err := quire.Inputs(plan, func(int32) []int32 { return tokens })
	if err != nil {
		return nil, err
	}
	inputs[0].Sampling = &computev1.SamplingParameters{
		Temperature:      proto.Float32(float32(chosen.temperature)),
		TopP:             proto.Float32(0.95),
		FrequencyPenalty: 0.1,
		Seed:             chosen.seed,
		Grammar:          grammar,
		OutputBeginsAt:   int32(len(tokens)),
	}
	inputs[0].PromptLogprobCount = proto.Int32(0)
	inputs[0].NextTokenIds = tokens[1:]
	return inputs, nil
}

// step plans a step, runs it and returns its answer. inputs makes what the worker
// has to be told; nil for nothing.
func step(ctx context.Context, lease *quire.Lease, worker *quire.Worker, wanted *cachev1.PlanStepRequest,
	inputs func(*cachev1.PlanStepResponse) ([]*computev1.SequenceInput, error)) (*computev1.RunStepResponse, error) {
	plan, err := lease.Plan(ctx, wanted)
	if err != nil {
		return nil, err
	}
	if refusals := plan.GetRefusals(); len(refusals) > 0 {
		return nil, quire.RefusalError(refusals[0]) // the lease ends with us, so its step need not be sent
	}
	request := &computev1.RunStepRequest{Grant: plan.GetGrant()}
	if inputs != nil {
		if request.Inputs, err = inputs(plan); err != nil {
			return nil, err
		}
	}
	return worker.Run(ctx, request)
}
