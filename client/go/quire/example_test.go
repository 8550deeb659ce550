package quire_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log"
	"os"
	"strings"

	"github.com/quire-kv/quire/client/go/quire"
	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
	computev1 "github.com/quire-kv/quire/client/go/quire/compute/v1"
	enginev1 "github.com/quire-kv/quire/client/go/quire/engine/v1"
)

// One prompt, one token: everything that a step takes.
func Example() {
	ctx := context.Background()
	client, err := quire.Dial("unix:/run/quire/cachemgr.sock")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	lease, err := client.CreateLease(ctx, quire.LeaseOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer lease.Delete(ctx)
	worker, err := quire.DialWorker(lease.WorkerAddress())
	if err != nil {
		log.Fatal(err)
	}
	defer worker.Close()

	prompt := []int32{11, 12, 13}
	plan, err := lease.Plan(ctx, &cachev1.PlanStepRequest{
		Admissions: []*cachev1.Admission{{SequenceId: 1, TokenIds: prompt}},
	})
	if err != nil {
		log.Fatal(err)
	}
	inputs, err := quire.Inputs(plan, func(int32) []int32 { return prompt })
	if err != nil {
		log.Fatal(err)
	}
	answer, err := worker.Run(ctx, &computev1.RunStepRequest{Grant: plan.Grant, Inputs: inputs})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("the next token is", answer.SampledTokenIds)
}

// Text after a prompt, as it comes.
func ExampleEngine() {
	engine, err := quire.DialEngine("unix:/run/quire/engine.sock")
	if err != nil {
		log.Fatal(err)
	}
	defer engine.Close()
	request := &enginev1.GenerateRequest{Prompt: quire.Text("The default value of this parameter")}
	for chunk, err := range engine.Generate(context.Background(), request).Chunks() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(chunk.Text)
	}
}

// What to do about an error is decided by its reason.
func ExampleError() {
	var lease *quire.Lease
	_, err := lease.Plan(context.Background(), &cachev1.PlanStepRequest{})
	var said *quire.Error
	switch {
	case errors.Is(err, quire.ErrLeaseNotFound): // take a new lease, admit the tokens again
	case errors.Is(err, quire.ErrEpochChanged): // lease.FollowEpoch, admit the tokens again
	case errors.Is(err, quire.ErrUnavailable): // plan again with the same request_id
	case errors.As(err, &said):
		log.Println(said.Code, said.Reason, said.Metadata)
	}
}

// With a client certificate and a token that may be replaced while the program runs.
func ExampleWithTLS() {
	authorities, err := os.ReadFile("ca.pem")
	if err != nil {
		log.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(authorities)
	certificate, err := tls.LoadX509KeyPair("client.pem", "client.key")
	if err != nil {
		log.Fatal(err)
	}
	client, err := quire.Dial("cachemgr.example:7070",
		quire.WithTLS(&tls.Config{RootCAs: pool, Certificates: []tls.Certificate{certificate}}),
		quire.WithTokenSource(func() (string, error) {
			token, err := os.ReadFile("token")
			return strings.TrimSpace(string(token)), err
		}))
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
}
