// Command text writes the text that follows a prompt, as it comes from a front
// door (quire serve --grpc-listen).
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os/signal"
	"strings"
	"syscall"

	"github.com/quire-kv/quire/client/go/quire"
	enginev1 "github.com/quire-kv/quire/client/go/quire/engine/v1"
)

func main() {
	address := flag.String("engine", "unix:/run/quire/engine.sock", "where the front door serves gRPC")
	model := flag.String("model", "", "its name, if several are served")
	maxTokens := flag.Int("max-tokens", 64, "most tokens to generate")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *address, *model, strings.Join(flag.Args(), " "), int32(*maxTokens)); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, address, model, prompt string, maxTokens int32) error {
	engine, err := quire.DialEngine(address)
	if err != nil {
		return err
	}
	defer engine.Close()
	parameters := &enginev1.GenerationParameters{MaxTokens: &maxTokens}
	request := &enginev1.GenerateRequest{Model: model, Prompt: quire.Text(prompt), Parameters: parameters}
	generation := engine.Generate(ctx, request)
	for chunk, err := range generation.Chunks() {
		if err != nil {
			return err
		}
		fmt.Print(chunk.GetText())
	}
	summary := generation.Summary
	fmt.Printf("\n%d tokens of prompt, %d from the cache; %d tokens generated in %v\n", summary.GetPromptTokenCount(),
		summary.GetCachedTokenCount(), summary.GetGeneratedTokenCount(), summary.GetTotalTime().AsDuration())
	return nil
}
