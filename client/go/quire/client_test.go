package quire

import (
	"context"
	"crypto/tls"
	"errors"
	"slices"
	"testing"
	"time"

	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
)

func TestATokenIsNotSentInPlainTextToOthers(t *testing.T) {
	for _, address := range []string{"192.0.2.1:7070", "nowhere.invalid:7070", "no-port"} {
		if client, err := Dial(address, WithToken("secret")); err == nil {
			client.Close()
			t.Errorf("%s would get the token", address)
		}
	}
	for _, address := range []string{"unix:/nowhere.sock", "127.0.0.1:7070", "[::1]:7070"} {
		client, err := Dial(address, WithToken("secret"))
		if err != nil {
			t.Errorf("%s: %v", address, err)
			continue
		}
		client.Close()
	}
	client, err := Dial("192.0.2.1:7070", WithToken("secret"), WithTLS(&tls.Config{}))
	if err != nil {
		t.Fatal(err)
	}
	client.Close()
}

func TestATokenIsOneWord(t *testing.T) {
	for _, token := range []string{"", "two words", "line\n", "caf\u00e9"} {
		source := bearer{func() (string, error) { return token, nil }}
		if _, err := source.GetRequestMetadata(t.Context()); err == nil {
			t.Errorf("%q is taken for a token", token)
		}
	}
}

func TestAServerThatIsAwayIsAnErrorOfTheCall(t *testing.T) {
	client, err := Dial("unix:" + t.TempDir() + "/nobody.sock")
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if _, err := client.CreateLease(t.Context(), LeaseOptions{}); !errors.Is(err, ErrUnavailable) {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), -time.Second)
	defer cancel()
	if _, err := client.CreateLease(ctx, LeaseOptions{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

func TestInputsAreTheTokensThatThePlanWants(t *testing.T) {
	known := map[int32][]int32{3: {30, 31, 32, 33}, 4: {40, 41}}
	tokens := func(sequence int32) []int32 { return known[sequence] }
	plan := &cachev1.PlanStepResponse{
		RunSequenceIds: []int32{4, 3}, RunStarts: []int32{1, 1}, RunTokenCounts: []int32{1, 2}, GivenRunIndexes: []int32{1}}
	inputs, err := Inputs(plan, tokens)
	if err != nil || len(inputs) != 1 || inputs[0].SequenceId != 3 || !slices.Equal(inputs[0].TokenIds, []int32{31, 32}) {
		t.Errorf("%v, %v", inputs, err)
	}
	for _, broken := range []*cachev1.PlanStepResponse{
		{GivenRunIndexes: []int32{0}},
		{RunSequenceIds: []int32{4}, RunStarts: []int32{1}, RunTokenCounts: []int32{2}, GivenRunIndexes: []int32{0}},
		{RunSequenceIds: []int32{4}, RunStarts: []int32{-1}, RunTokenCounts: []int32{1}, GivenRunIndexes: []int32{0}},
		{RunSequenceIds: []int32{4}, RunStarts: []int32{0}, RunTokenCounts: []int32{1}, GivenRunIndexes: []int32{-1}},
	} {
		if _, err := Inputs(broken, tokens); err == nil {
			t.Errorf("%v gives inputs", broken)
		}
	}
}

func TestAPlanIsFilledInWhereItIsEmpty(t *testing.T) {
	lease := &Lease{id: "mine", epoch: 7}
	given := &cachev1.PlanStepRequest{RequestId: "1"}
	filled := lease.filled(given)
	if filled.LeaseId != "mine" || filled.Epoch != 7 || filled.RequestId != "1" || given.LeaseId != "" || given.Epoch != 0 {
		t.Errorf("%v of %v", filled, given)
	}
	if other := lease.filled(&cachev1.PlanStepRequest{LeaseId: "other", Epoch: 1}); other.LeaseId != "other" || other.Epoch != 1 {
		t.Error(other)
	}
}
