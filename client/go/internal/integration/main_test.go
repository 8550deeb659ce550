// Package integration drives the two real services from Go, and runs the examples. Its tests need QUIRE_PYTHON and
// QUIRE_ROOT; without them they are skipped.
package integration

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/quire-kv/quire/client/go/internal/services"
	"github.com/quire-kv/quire/client/go/quire"
	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
)

var (
	fleet    *services.Fleet // pools "a" and "b"; nil if there is no Python
	examples string          // the folder of their binaries
)

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	if services.Python() == "" {
		return m.Run()
	}
	folder, err := os.MkdirTemp("/tmp", "quire-go-") // a socket's path must be short
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(folder)
	if fleet, err = services.StartFleet(folder, "a", "b"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer fleet.Stop()
	examples = filepath.Join(folder, "bin")
	if said, err := exec.Command("go", "build", "-race", "-o", examples+"/", "../../examples/...").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "%s%v\n", said, err)
		return 1
	}
	status := m.Run()
	if defects := fleet.Defects(); len(defects) > 0 {
		fmt.Fprintln(os.Stderr, "the services have written:", defects)
		return 1
	}
	return status
}

// needFleet skips a test without the services, and requires of those with them that every block comes back.
func needFleet(t *testing.T) *quire.Client {
	t.Helper()
	if fleet == nil {
		t.Skip("QUIRE_PYTHON says where a Python with Quire is: run make test")
	}
	client := dial(t)
	t.Cleanup(func() {
		awaitThat(t, "every block is free or cached, and no lease is left", func() bool {
			pools, err := client.Service.ListPools(context.Background(), &cachev1.ListPoolsRequest{})
			if err != nil {
				return false
			}
			for _, pool := range pools.GetPools() {
				counts := pool.GetBlockCounts()
				if counts.GetActiveCount() != 0 || counts.GetRetiredCount() != 0 || pool.GetLeaseCount() != 0 {
					return false
				}
			}
			return true
		})
		client.Close()
	})
	return client
}

func dial(t *testing.T, options ...quire.Option) *quire.Client {
	t.Helper()
	client, err := quire.Dial(fleet.Cachemgr(), options...)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func awaitThat(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !condition(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 20 s: %s", what)
		}
	}
}
