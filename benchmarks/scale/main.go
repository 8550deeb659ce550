// Load for one cachemgr: workers that obey the protocol and compute nothing, and engines that plan steps for them.
//
//	scale --cachemgr unix:/path --trace requests.jsonl --workers 4 --engines 4 --seconds 5
//
// It prints "ready" when every engine has its batch running, waits for a line on standard input, measures, and prints
// one line of JSON. It ends with standard input. __main__.py starts it.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
)

// Settings are of all workers and engines.
type Settings struct {
	Batch     int
	NumBlocks int
	Interval  time.Duration
}

// Result has the figures of all engines. Latencies are of plans, from a message that is built to a decoded answer.
type Result struct {
	Seconds      float64 `json:"seconds"`
	DecodeUs     []int64 `json:"decode_us"`
	AdmissionUs  []int64 `json:"admission_us"`
	PromptTokens int64   `json:"prompt_tokens"`
	CachedTokens int64   `json:"cached_tokens"`
	NumRefused   int64   `json:"num_refused"`
	NumPutOff    int64   `json:"num_put_off"`
	NumLate      int64   `json:"num_late"`
}

func main() {
	address := flag.String("cachemgr", "", "its address")
	trace := flag.String("trace", "", "file of requests, a JSON object a line")
	workers := flag.Int("workers", 1, "workers, each with a pool")
	engines := flag.Int("engines", 1, "engines, in turn over the pools")
	seconds := flag.Float64("seconds", 5, "time to measure")
	settings := Settings{}
	flag.IntVar(&settings.Batch, "batch", 64, "sequences that an engine decodes at once")
	flag.IntVar(&settings.NumBlocks, "blocks", 65_536, "blocks of each pool")
	flag.DurationVar(&settings.Interval, "interval", 0, "time from an engine's step to its next one; 0: none")
	flag.Parse()
	requests, err := readTrace(*trace)
	if err != nil {
		log.Fatal(err)
	}
	if err := run(*address, requests, *workers, *engines, *seconds, settings); err != nil {
		log.Fatal(err)
	}
}

func run(address string, requests []Request, numWorkers, numEngines int, seconds float64, settings Settings) error {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	failed := make(chan error, numWorkers+numEngines)
	workers := make([]*Worker, numWorkers)
	for index := range workers {
		stub, err := connect(address)
		if err != nil {
			return err
		}
		workers[index] = newWorker(fmt.Sprintf("pool-%02d", index), settings.NumBlocks)
		go func() { failed <- workers[index].attach(ctx, stub) }()
	}
	engines := make([]*Engine, numEngines)
	var full sync.WaitGroup
	for index := range engines {
		stub, err := connect(address)
		if err != nil {
			return err
		}
		worker := workers[index%numWorkers]
		<-worker.attached
		// Each engine begins at another place of the trace, and at another moment of the interval.
		first := index * len(requests) / numEngines
		engines[index] = newEngine(stub, worker, requests, first, settings)
		delay := settings.Interval * time.Duration(index) / time.Duration(numEngines)
		full.Add(1)
		go func() { failed <- engines[index].run(ctx, delay, full.Done) }()
	}
	if err := await(&full, failed); err != nil {
		return err
	}
	fmt.Println("ready")
	orders := bufio.NewReader(os.Stdin)
	if _, err := orders.ReadString('\n'); err != nil {
		return err
	}
	began := time.Now()
	for _, engine := range engines {
		engine.measures.Store(true)
	}
	select {
	case err := <-failed:
		return err
	case <-time.After(time.Duration(seconds * float64(time.Second))):
	}
	result := Result{Seconds: time.Since(began).Seconds(), DecodeUs: []int64{}, AdmissionUs: []int64{}}
	for _, engine := range engines {
		engine.addTo(&result)
	}
	if err := json.NewEncoder(os.Stdout).Encode(result); err != nil {
		return err
	}
	_, err := orders.ReadString('\n') // the end of standard input: until then this process's times can be read
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// await returns when the group is done, or with the first error.
func await(group *sync.WaitGroup, failed <-chan error) error {
	done := make(chan struct{})
	go func() {
		group.Wait()
		close(done)
	}()
	select {
	case err := <-failed:
		return err
	case <-done:
		return nil
	}
}

// connect returns a stub with a connection of its own, as each engine and each worker has.
func connect(address string) (cachev1.CacheServiceClient, error) {
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	return cachev1.NewCacheServiceClient(connection), nil
}
