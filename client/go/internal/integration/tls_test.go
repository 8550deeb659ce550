package integration

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/quire-kv/quire/client/go/internal/services"
	"github.com/quire-kv/quire/client/go/quire"
	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
	computev1 "github.com/quire-kv/quire/client/go/quire/compute/v1"
)

// authority is a CA with files in a folder.
type authority struct {
	folder      string
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	path        string
}

func newAuthority(t *testing.T, folder string) *authority {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "the authority"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	content, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := x509.ParseCertificate(content)
	if err != nil {
		t.Fatal(err)
	}
	made := &authority{folder: folder, certificate: certificate, key: key, path: filepath.Join(folder, "ca.pem")}
	write(t, made.path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: content}))
	return made
}

// issue makes a certificate for a name, and says where it and its key are.
func (a *authority) issue(t *testing.T, name string) (string, string) {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), DNSNames: []string{name}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	content, err := x509.CreateCertificate(rand.Reader, template, a.certificate, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	encodedKey, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certPath, keyPath := filepath.Join(a.folder, name+".pem"), filepath.Join(a.folder, name+".key")
	write(t, certPath, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: content}))
	write(t, keyPath, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encodedKey}))
	return certPath, keyPath
}

// config trusts the authority and shows a certificate, or none if the name is empty.
func (a *authority) config(t *testing.T, name string) *tls.Config {
	t.Helper()
	trusted := x509.NewCertPool()
	trusted.AddCert(a.certificate)
	config := &tls.Config{RootCAs: trusted}
	if name != "" {
		pair, err := tls.LoadX509KeyPair(a.issue(t, name))
		if err != nil {
			t.Fatal(err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func write(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
}

// server is a service with TLS: one port asks for certificates, the other one for tokens.
type server struct {
	process         *services.Process
	address, tokens string
}

func startServer(t *testing.T, folder, name, module string, arguments ...string) server {
	t.Helper()
	socket := "unix:" + filepath.Join(folder, name+".sock") // for its health
	listen := []string{"--listen", "127.0.0.1:0", "--listen", socket, "--token-listen", "127.0.0.1:0"}
	process, err := services.Start(folder, name, module, append(listen, arguments...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(process.Stop)
	if err := process.AwaitServing(socket); err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`listening addresses=(\S+)`).FindStringSubmatch(process.Log())
	if found == nil {
		t.Fatal(process.Log())
	}
	bound := strings.Split(found[1], ",")
	return server{process, bound[0], bound[len(bound)-1]}
}

func TestCallsOverTLSWithACertificateOrAToken(t *testing.T) {
	if services.Python() == "" {
		t.Skip("QUIRE_PYTHON says where a Python with Quire is: run make test")
	}
	folder, err := os.MkdirTemp("/tmp", "quire-go-tls-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	ca := newAuthority(t, folder)
	certPath, keyPath := ca.issue(t, "localhost")
	workerCert, workerKey := ca.issue(t, "worker.example")
	accepted := filepath.Join(folder, "tokens")
	write(t, accepted, fmt.Appendf(nil, "alice client %x\nengine.example client cert\nworker.example worker cert\n",
		sha256.Sum256([]byte("a-token"))))
	secured := []string{"--tls-cert", certPath, "--tls-key", keyPath, "--tls-client-ca", ca.path, "--token-file", accepted}
	cachemgr := startServer(t, folder, "cachemgr", "quire.cachemgr", secured...)
	worker := startServer(t, folder, "worker", "quire.worker", append(secured, "--cachemgr", cachemgr.address,
		"--cachemgr-tls-ca", ca.path, "--cachemgr-tls-cert", workerCert, "--cachemgr-tls-key", workerKey, "--threads", "1",
		"--model", services.DemoModel(), "--num-blocks", "16", "--device", "cpu")...)

	t.Run("certificate", func(t *testing.T) {
		withCertificate := quire.WithTLS(ca.config(t, "engine.example"))
		if err := sampleOne(t, cachemgr.address, "", withCertificate); err != nil {
			t.Error(err)
		}
	})
	t.Run("token", func(t *testing.T) {
		err := sampleOne(t, cachemgr.tokens, worker.tokens, quire.WithTLS(ca.config(t, "")), quire.WithToken("a-token"))
		if err != nil {
			t.Error(err)
		}
	})
	t.Run("no certificate", func(t *testing.T) {
		err := sampleOne(t, cachemgr.address, "", quire.WithTLS(ca.config(t, "")), quire.WithToken("a-token"))
		if !errors.Is(err, quire.ErrUnavailable) {
			t.Error(err)
		}
	})
	t.Run("plain text", func(t *testing.T) {
		if err := sampleOne(t, cachemgr.tokens, "", quire.WithToken("a-token")); !errors.Is(err, quire.ErrUnavailable) {
			t.Error(err)
		}
	})
	t.Run("another authority", func(t *testing.T) {
		config := ca.config(t, "engine.example")
		config.RootCAs = x509.NewCertPool()
		if err := sampleOne(t, cachemgr.address, "", quire.WithTLS(config)); !errors.Is(err, quire.ErrUnavailable) {
			t.Error(err)
		}
	})
	for reason, options := range map[quire.Reason][]quire.Option{
		quire.ErrCredentialsMissing: nil,
		quire.ErrTokenRejected:      {quire.WithToken("another")},
	} {
		t.Run(string(reason), func(t *testing.T) {
			options := append(options, quire.WithTLS(ca.config(t, "")))
			if err := sampleOne(t, cachemgr.tokens, "", options...); !errors.Is(err, reason) {
				t.Error(err)
			}
		})
	}
	t.Run("ROLE_MISSING", func(t *testing.T) {
		err := sampleOne(t, cachemgr.address, "", quire.WithTLS(ca.config(t, "worker.example")))
		var said *quire.Error
		if !errors.Is(err, quire.ErrRoleMissing) || !errors.As(err, &said) || said.Metadata["name"] != "worker.example" {
			t.Error(err)
		}
	})
}

// sampleOne goes the whole path: lease, plan, step, deletion. The worker is where the lease says if no address is given.
func sampleOne(t *testing.T, cachemgr, worker string, options ...quire.Option) error {
	t.Helper()
	client, err := quire.Dial(cachemgr, options...)
	if err != nil {
		return err
	}
	defer client.Close()
	lease, err := client.CreateLease(t.Context(), quire.LeaseOptions{})
	if err != nil {
		return err
	}
	defer lease.Delete(context.Background())
	if worker == "" {
		worker = lease.WorkerAddress()
	}
	steps, err := quire.DialWorker(worker, options...)
	if err != nil {
		return err
	}
	defer steps.Close()
	prompt := []int32{300, 301, 302}
	plan, err := lease.Plan(t.Context(), &cachev1.PlanStepRequest{
		Admissions: []*cachev1.Admission{{SequenceId: 1, TokenIds: prompt}}})
	if err != nil {
		return err
	}
	inputs, err := quire.Inputs(plan, func(int32) []int32 { return prompt })
	if err != nil {
		return err
	}
	answer, err := steps.Run(t.Context(), &computev1.RunStepRequest{Grant: plan.GetGrant(), Inputs: inputs})
	if err == nil && len(answer.GetSampledTokenIds()) != 1 {
		return errors.New("no token was sampled")
	}
	return err
}
