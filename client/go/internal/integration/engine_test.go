package integration

import (
	"context"
	"encoding/json"
	"errors"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/quire-kv/quire/client/go/internal/services"
	"github.com/quire-kv/quire/client/go/quire"
	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
	enginev1 "github.com/quire-kv/quire/client/go/quire/engine/v1"
)

// TestEngine runs the tests below on one engine, and deletes its lease in the end.
func TestEngine(t *testing.T) {
	needFleet(t)
	process, err := fleet.StartEngine("a")
	if process != nil {
		defer process.Stop()
	}
	if err != nil {
		t.Fatal(err)
	}
	engine, err := quire.DialEngine(fleet.Engine())
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	for name, test := range map[string]func(*testing.T, *quire.Engine){
		"generates what the Python engine does":                          generatesWhatThePythonEngineDoes,
		"cancels a request when its loop is left or its context is over": cancelsARequest,
		"names the reason of an error":                                   namesTheReason,
		"writes text in the example":                                     writesText,
	} {
		t.Run(name, func(t *testing.T) { test(t, engine) })
	}
}

func greedy(maxTokens int32) *enginev1.GenerationParameters {
	return &enginev1.GenerationParameters{MaxTokens: &maxTokens, Temperature: proto.Float32(0), IgnoreEos: true}
}

func generatesWhatThePythonEngineDoes(t *testing.T, engine *quire.Engine) {
	prompt := []int32{300, 305, 307, 314}
	encoded, err := json.Marshal([][]int32{prompt})
	if err != nil {
		t.Fatal(err)
	}
	said := output(t, services.Python(), "-P", "-c", pythonEngine, fleet.Cachemgr(), string(encoded), "24")
	var expected [][]int32
	if err := json.Unmarshal([]byte(said), &expected); err != nil {
		t.Fatal(err)
	}
	parameters := greedy(24)
	parameters.IgnoreEos, parameters.PromptLogprobs = false, proto.Int32(0)
	request := &enginev1.GenerateRequest{Prompt: quire.Tokens(prompt...), Parameters: parameters}
	generation := engine.Generate(t.Context(), request)
	var tokens []int32
	for chunk, err := range generation.Chunks() {
		if err != nil {
			t.Fatal(err)
		}
		tokens = append(tokens, chunk.GetTokenIds()...)
	}
	if !slices.Equal(tokens, expected[0]) {
		t.Errorf("Go gets %v, Python %v", tokens, expected[0])
	}
	if int(generation.Summary.GetGeneratedTokenCount()) != len(tokens) || len(generation.PromptLogprobs) != len(prompt)-1 {
		t.Errorf("%v, %d log-probabilities", generation.Summary, len(generation.PromptLogprobs))
	}
}

func cancelsARequest(t *testing.T, engine *quire.Engine) {
	request := &enginev1.GenerateRequest{Prompt: quire.Text("The default value"), Parameters: greedy(1000)}
	for _, err := range engine.Generate(t.Context(), request).Chunks() {
		if err != nil {
			t.Fatal(err)
		}
		break
	}
	awaitIdle(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var last error
	for _, err := range engine.Generate(ctx, request).Chunks() {
		cancel()
		last = err
	}
	if !errors.Is(last, context.Canceled) {
		t.Error(last)
	}
	awaitIdle(t)
	expired, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	for _, err := range engine.Generate(expired, request).Chunks() {
		last = err
	}
	if !errors.Is(last, context.DeadlineExceeded) {
		t.Error(last)
	}
	awaitIdle(t)
}

// awaitIdle waits until no sequence is left in the pool.
func awaitIdle(t *testing.T) {
	t.Helper()
	client := dial(t)
	defer client.Close()
	awaitThat(t, "no sequence is left", func() bool {
		pools, err := client.Service.ListPools(context.Background(), &cachev1.ListPoolsRequest{})
		if err != nil {
			return false
		}
		return !slices.ContainsFunc(pools.GetPools(), func(pool *cachev1.Pool) bool {
			return pool.GetBlockCounts().GetActiveCount() != 0
		})
	})
}

func namesTheReason(t *testing.T, engine *quire.Engine) {
	parameters := &enginev1.GenerationParameters{TopP: proto.Float32(2)}
	request := &enginev1.GenerateRequest{Prompt: quire.Text("The default value"), Parameters: parameters}
	var said *quire.Error
	for _, err := range engine.Generate(t.Context(), request).Chunks() {
		if !errors.Is(err, quire.ErrInvalidArgument) || !errors.As(err, &said) {
			t.Fatal(err)
		}
	}
	if said == nil || said.Metadata["field"] != "parameters.top_p" || said.Domain != "engine.quire.dev" || said.Code != codes.InvalidArgument {
		t.Errorf("%#v", said)
	}
	_, err := engine.Service.Tokenize(t.Context(), &enginev1.TokenizeRequest{Model: "nobody's"})
	if !errors.Is(err, quire.ErrModelNotFound) {
		t.Error(err)
	}
}

func writesText(t *testing.T, _ *quire.Engine) {
	text := output(t, filepath.Join(examples, "text"), "-engine", fleet.Engine(), "-max-tokens", "16",
		"-temperature", "0", "The default value")
	lines := strings.Split(strings.TrimSpace(text), "\n")
	if !strings.Contains(lines[len(lines)-1], strconv.Itoa(16)+" tokens generated") || len(lines) < 2 {
		t.Error(text)
	}
}
