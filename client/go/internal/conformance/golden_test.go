// Package conformance holds the Go stubs against the encodings that Python has
// written down in tests/conformance/golden.txt.
package conformance

import (
	"bytes"
	"encoding/hex"
	"os"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
	computev1 "github.com/quire-kv/quire/client/go/quire/compute/v1"
	enginev1 "github.com/quire-kv/quire/client/go/quire/engine/v1"
)

const path = "../../../../tests/conformance/golden.txt"

type entry struct {
	name string
	text string
	wire []byte
}

func read(t *testing.T) []entry {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var entries []entry
	for _, paragraph := range strings.Split(strings.TrimSpace(string(content)), "\n\n")[1:] { // the first is a comment
		lines := strings.Split(paragraph, "\n")
		last := len(lines) - 1
		wire, err := hex.DecodeString(strings.TrimSpace(strings.TrimPrefix(lines[last], "wire:")))
		if err != nil {
			t.Fatalf("%q: %v", lines[last], err)
		}
		entries = append(entries, entry{strings.TrimPrefix(lines[0], "message: "), strings.Join(lines[1:last], "\n"), wire})
	}
	return entries
}

func messageType(t *testing.T, name string) protoreflect.MessageType {
	t.Helper()
	found, err := protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName(name))
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return found
}

func TestTextAndBytesSayTheSame(t *testing.T) {
	for _, golden := range read(t) {
		kind := messageType(t, golden.name)
		fromText, fromWire := kind.New().Interface(), kind.New().Interface()
		if err := prototext.Unmarshal([]byte(golden.text), fromText); err != nil {
			t.Errorf("%s: %v", golden.name, err)
		}
		if err := proto.Unmarshal(golden.wire, fromWire); err != nil {
			t.Errorf("%s: %v", golden.name, err)
		}
		if !proto.Equal(fromText, fromWire) {
			t.Errorf("%s: the bytes say %v, the text %v", golden.name, fromWire, fromText)
		}
		wire, err := proto.MarshalOptions{Deterministic: true}.Marshal(fromText)
		if err != nil || !bytes.Equal(wire, golden.wire) {
			t.Errorf("%s: %x is written as %x (%v)", golden.name, golden.wire, wire, err)
		}
		if unknown := fromWire.ProtoReflect().GetUnknown(); len(unknown) > 0 {
			t.Errorf("%s: %x is not known here", golden.name, unknown)
		}
	}
}

func TestEveryMessageIsThere(t *testing.T) {
	there := map[protoreflect.FullName]bool{}
	for _, golden := range read(t) {
		there[protoreflect.FullName(golden.name)] = true
	}
	for _, file := range []protoreflect.FileDescriptor{
		cachev1.File_quire_cache_v1_error_proto, cachev1.File_quire_cache_v1_grant_proto,
		cachev1.File_quire_cache_v1_attach_proto, cachev1.File_quire_cache_v1_cache_service_proto,
		computev1.File_quire_compute_v1_worker_service_proto, enginev1.File_quire_engine_v1_engine_service_proto,
	} {
		for index := range file.Messages().Len() {
			if name := file.Messages().Get(index).FullName(); !there[name] {
				t.Errorf("%s has no golden bytes", name)
			}
		}
	}
}
