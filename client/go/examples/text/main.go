// Command text writes the text that follows a prompt, as it comes from a
// gateway (quire serve --grpc-listen).
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
	address := flag.String("engine", "unix:/run/quire/engine.sock", "where the gateway serves gRPC")
	model := flag.String("model", "", "its name, if several are served")
	maxTokens := flag.Int("max-tokens", 64, "most tokens to generate")
	temperature := flag.Float64("temperature", 1, "0 takes the most probable token each time")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	tokens, heat := int32(*maxTokens), float32(*temperature)
	parameters := &enginev1.GenerationParameters{MaxTokens: &tokens, Temperature: &heat}
	if err := run(ctx, *address, *model, strings.Join(flag.Args(), " "), parameters); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, address, model, prompt string, parameters *enginev1.GenerationParameters) error {
	engine, err := quire.DialEngine(address)
	if err != nil {
		return err
	}
	defer engine.Close()
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
