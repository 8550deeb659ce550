package quire

import (
	"context"
	"errors"
	"io"
	"iter"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	enginev1 "github.com/quire-kv/quire/client/go/quire/engine/v1"
)

// Engine is a connection to a gateway (quire serve --grpc-listen), which has
// the engine: text, without leases and plans. It is safe for concurrent use.
type Engine struct {
	// Service has every call of the contract.
	Service enginev1.EngineServiceClient

	connection *grpc.ClientConn
}

// DialEngine makes a client of the gateway at "unix:/path" or "host:port". It
// does not wait for a connection: a server that is away is an error of the calls.
func DialEngine(address string, options ...Option) (*Engine, error) {
	connection, err := dial(address, options)
	if err != nil {
		return nil, err
	}
	return &Engine{Service: enginev1.NewEngineServiceClient(connection), connection: connection}, nil
}

// Close ends the connection and all calls on it.
func (e *Engine) Close() error { return e.connection.Close() }

// Text is a prompt of text.
func Text(text string) *enginev1.Prompt {
	return &enginev1.Prompt{Prompt: &enginev1.Prompt_Text{Text: text}}
}

// Tokens is a prompt of token ids.
func Tokens(tokenIDs ...int32) *enginev1.Prompt {
	return &enginev1.Prompt{Prompt: &enginev1.Prompt_TokenIds{TokenIds: &enginev1.TokenIds{TokenIds: tokenIDs}}}
}

// Generation is a request to generate text. It is for one goroutine.
type Generation struct {
	// PromptLogprobs are those of the prompt's tokens from the second one on, if the
	// request asked for them. They are there with the first chunk that has a token.
	PromptLogprobs []*enginev1.TokenLogprobs
	// Summary is what the request took; nil until Chunks has ended without an error.
	Summary *enginev1.GenerationSummary

	ctx     context.Context
	service enginev1.EngineServiceClient
	request *enginev1.GenerateRequest
}

// Generate makes a request. It is sent when Chunks is iterated over. Without a
// deadline in ctx it may take as long as it does; see also
// GenerationParameters.timeout.
func (e *Engine) Generate(ctx context.Context, request *enginev1.GenerateRequest) *Generation {
	return &Generation{ctx: ctx, service: e.Service, request: proto.CloneOf(request)}
}

// Chunks sends the request and returns its chunks as they come. An error is the
// last thing it returns. A loop that is left early cancels the request, as
// cancelling the context does: the server frees its blocks at once. Each iteration
// is a request of its own.
func (g *Generation) Chunks() iter.Seq2[*enginev1.GenerationChunk, error] {
	return func(yield func(*enginev1.GenerationChunk, error) bool) {
		ctx, cancel := context.WithCancel(g.ctx)
		defer cancel()
		g.PromptLogprobs, g.Summary = nil, nil
		answers, err := g.service.Generate(ctx, g.request)
		for err == nil {
			var answer *enginev1.GenerateResponse
			if answer, err = answers.Recv(); err != nil {
				break
			}
			g.PromptLogprobs = append(g.PromptLogprobs, answer.GetPromptLogprobs().GetTokens()...)
			if answer.GetSummary() != nil {
				g.Summary = answer.GetSummary()
			}
			if chunk := answer.GetChunk(); chunk != nil && !yield(chunk, nil) {
				return
			}
		}
		if !errors.Is(err, io.EOF) {
			g.Summary = nil
			yield(nil, err)
		}
	}
}
