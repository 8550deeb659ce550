// Package services runs Quire's two services as child processes, for tests. They
// are Python: the interpreter with Quire installed is in QUIRE_PYTHON, the tree in
// QUIRE_ROOT.
package services

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

const (
	startTimeout = 2 * time.Minute // a busy machine loads torch
	stopTimeout  = 10 * time.Second
)

// Python is the interpreter with Quire installed, empty if there is none.
func Python() string { return os.Getenv("QUIRE_PYTHON") }

// DemoModel is the folder of the model that ships with Quire.
func DemoModel() string { return filepath.Join(os.Getenv("QUIRE_ROOT"), "deploy", "demo", "model") }

// Process is one service.
type Process struct {
	name    string
	command *exec.Cmd
	log     string
	guard   *os.File // the service ends when this does, however this process ends
	exited  chan struct{}
}

// Start starts a module ("quire.cachemgr"), which logs into the folder under a
// name, and does not wait for it.
func Start(folder, name, module string, arguments ...string) (*Process, error) {
	reader, writer, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer reader.Close()
	process := &Process{name: name, log: filepath.Join(folder, name+".log"), guard: writer, exited: make(chan struct{})}
	log, err := os.Create(process.log)
	if err != nil {
		writer.Close()
		return nil, err
	}
	defer log.Close()
	guarded := filepath.Join(os.Getenv("QUIRE_ROOT"), "client", "quire", "cli", "guarded.py")
	process.command = exec.Command(Python(), append([]string{"-P", guarded, "3", module}, arguments...)...)
	process.command.ExtraFiles = []*os.File{reader} // file descriptor 3
	process.command.Stdout, process.command.Stderr = log, log
	process.command.Dir = folder
	if err := process.command.Start(); err != nil {
		writer.Close()
		return nil, err
	}
	go func() {
		_ = process.command.Wait()
		close(process.exited)
	}()
	return process, nil
}

// AwaitServing waits until the service's health at an address is SERVING.
func (p *Process) AwaitServing(address string, options ...grpc.DialOption) error {
	if len(options) == 0 {
		options = []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	}
	connection, err := grpc.NewClient(address, options...)
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	go func() {
		select {
		case <-p.exited:
			cancel()
		case <-ctx.Done():
		}
	}()
	watch, err := healthpb.NewHealthClient(connection).Watch(ctx, &healthpb.HealthCheckRequest{}, grpc.WaitForReady(true))
	for err == nil {
		var answer *healthpb.HealthCheckResponse
		if answer, err = watch.Recv(); err == nil && answer.GetStatus() == healthpb.HealthCheckResponse_SERVING {
			return nil
		}
	}
	return fmt.Errorf("%s is not serving: %w; its log:\n%s", p.name, err, p.Log())
}

// Log is what the service has written.
func (p *Process) Log() string {
	content, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(content)
}

// Stop ends the service, with SIGKILL if it takes too long. Doing it twice is fine.
func (p *Process) Stop() {
	_ = p.command.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.exited:
	case <-time.After(stopTimeout):
		_ = p.command.Process.Kill()
		<-p.exited
	}
	p.guard.Close()
}

// Fleet is a cachemgr and workers on unix sockets in a folder, each worker with
// the demo model on a pool of its own.
type Fleet struct {
	folder    string
	processes []*Process
}

// StartFleet starts a cachemgr and a worker for each pool, and returns when all
// of them serve.
func StartFleet(folder string, pools ...string) (*Fleet, error) {
	fleet := &Fleet{folder: folder}
	if err := fleet.start(pools); err != nil {
		fleet.Stop()
		return nil, err
	}
	return fleet, nil
}

// Cachemgr is where cachemgr is reached.
func (f *Fleet) Cachemgr() string { return f.address("cachemgr") }

// Worker is where a pool's worker is reached.
func (f *Fleet) Worker(pool string) string { return f.address("worker-" + pool) }

// Engine is where EngineService is reached, once StartEngine has returned.
func (f *Fleet) Engine() string { return f.address("engine") }

// StartEngine starts an engine for a pool, which holds a lease of it, and returns
// when it serves. Stop the process to give the lease back.
func (f *Fleet) StartEngine(pool string) (*Process, error) {
	err := f.run("engine", "quire.gateway", "--listen", "127.0.0.1:0", "--grpc-listen", f.Engine(),
		"--cachemgr", f.Cachemgr(), "--pool", pool)
	if err != nil {
		return nil, err
	}
	process := f.processes[len(f.processes)-1]
	return process, process.AwaitServing(f.Engine())
}

// Defects are the lines of all logs that no service should ever write.
func (f *Fleet) Defects() []string {
	var found []string
	for _, process := range f.processes {
		for line := range strings.Lines(process.Log()) {
			for _, sign := range []string{"handler failed", "Traceback", "never retrieved", "pool damaged"} {
				if strings.Contains(line, sign) {
					found = append(found, process.name+": "+line)
				}
			}
		}
	}
	return found
}

// Stop ends all of them, workers first.
func (f *Fleet) Stop() {
	for index := len(f.processes) - 1; index >= 0; index-- {
		f.processes[index].Stop()
	}
}

func (f *Fleet) address(name string) string { return "unix:" + filepath.Join(f.folder, name+".sock") }

func (f *Fleet) start(pools []string) error {
	if err := f.run("cachemgr", "quire.cachemgr", "--listen", f.Cachemgr()); err != nil {
		return err
	}
	for _, pool := range pools {
		err := f.run("worker-"+pool, "quire.worker", "--listen", f.Worker(pool), "--cachemgr", f.Cachemgr(),
			"--pool", pool, "--model", DemoModel(), "--dtype", "float32", "--device", "cpu", "--threads", "1",
			"--num-blocks", "64", "--max-step-tokens", "64")
		if err != nil {
			return err
		}
	}
	for index, process := range f.processes {
		address := f.Cachemgr()
		if index > 0 {
			address = f.Worker(pools[index-1])
		}
		if err := process.AwaitServing(address); err != nil {
			return err
		}
	}
	return nil
}

func (f *Fleet) run(name, module string, arguments ...string) error {
	process, err := Start(f.folder, name, module, arguments...)
	if err == nil {
		f.processes = append(f.processes, process)
	}
	return err
}
