package integration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/quire-kv/quire/client/go/internal/services"
	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
)

// What the Python engine samples for prompts, greedily.
const pythonEngine = `
import asyncio, json, sys
from quire.client import Engine, EngineConfig, SamplingParams

async def main(cachemgr, prompts, max_tokens):
    async with Engine.connect(cachemgr, config=EngineConfig(pool="b", max_step_tokens=64)) as engine:
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        completions = await engine.complete(prompts, params)
        print(json.dumps([list(completion.samples[0].token_ids) for completion in completions]))

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])))
`

func output(t *testing.T, name string, arguments ...string) string {
	t.Helper()
	command := exec.CommandContext(t.Context(), name, arguments...)
	var failure bytes.Buffer
	command.Stderr = &failure
	said, err := command.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s%s", filepath.Base(name), err, said, failure.String())
	}
	return string(said)
}

func join(tokens []int32) string {
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(tokens), " ", ","), "[]")
}

func TestGenerateSamplesWhatThePythonEngineDoes(t *testing.T) {
	needFleet(t)
	long := make([]int32, 150) // more than two steps of 64 compute
	for index := range long {
		long[index] = int32(1 + index*37%2000)
	}
	prompts := [][]int32{{300, 305, 307, 314}, long}
	const maxTokens = 24
	encoded, err := json.Marshal(prompts)
	if err != nil {
		t.Fatal(err)
	}
	said := output(t, services.Python(), "-P", "-c", pythonEngine, fleet.Cachemgr(), string(encoded), strconv.Itoa(maxTokens))
	var expected [][]int32
	if err := json.Unmarshal([]byte(said), &expected); err != nil {
		t.Fatal(err)
	}
	for index, prompt := range prompts {
		ids := output(t, filepath.Join(examples, "generate"), "-cachemgr", fleet.Cachemgr(), "-pool", "a", "-ids",
			"-tokens", join(prompt), "-max-tokens", strconv.Itoa(maxTokens))
		if got := strings.Fields(ids); !slices.Equal(got, strings.Split(join(expected[index]), ",")) {
			t.Errorf("prompt %d: Go samples %v, Python %v", index, got, expected[index])
		}
	}
}

func TestGenerateWritesText(t *testing.T) {
	needFleet(t)
	text := output(t, filepath.Join(examples, "generate"), "-cachemgr", fleet.Cachemgr(), "-pool", "a", "-max-tokens", "16",
		"The default value")
	if words := strings.Fields(text); len(words) < 4 || strings.ContainsRune(text, 'Ġ') {
		t.Errorf("%q is no text", text)
	}
}

func TestGenerateNamesTheReason(t *testing.T) {
	needFleet(t)
	said, err := exec.Command(filepath.Join(examples, "generate"), "-cachemgr", fleet.Cachemgr(), "-pool", "a", "-ids",
		"-tokens", "1,2,99999").CombinedOutput()
	if err == nil || !strings.Contains(string(said), "TOKEN_OUT_OF_RANGE") {
		t.Errorf("%v: %s", err, said)
	}
}

func TestStructuredFollowsASchema(t *testing.T) {
	needFleet(t)
	schema := `{"enum": [{"a": [1, "é"]}], "x-guidance": {"whitespace_flexible": false}}`
	said := output(t, filepath.Join(examples, "structured"), "-cachemgr", fleet.Cachemgr(), "-pool", "a", "-schema", schema,
		"The default value is")
	lines := strings.Split(strings.TrimSpace(said), "\n")
	if text := lines[len(lines)-1]; text != `{"a":[1,"é"]}` {
		t.Errorf("%q does not match the schema", text)
	}
	logprob := regexp.MustCompile(`^-\d+\.\d{3} ".+"$`)
	if len(lines) < 4 {
		t.Fatalf("%q: the prompt's log-probabilities are missing", said)
	}
	for _, line := range lines[:len(lines)-1] {
		if !logprob.MatchString(line) {
			t.Errorf("%q is no log-probability", line)
		}
	}
	if !strings.HasSuffix(lines[len(lines)-2], `" is"`) {
		t.Errorf("%q is not of the prompt's last token", lines[len(lines)-2])
	}
}

func TestStructuredNamesWhatIsWrong(t *testing.T) {
	needFleet(t)
	said, err := exec.Command(filepath.Join(examples, "structured"), "-cachemgr", fleet.Cachemgr(), "-pool", "a",
		"-schema", `{"type": "strng"}`, "The default").CombinedOutput()
	if err == nil || !strings.Contains(string(said), "INVALID_ARGUMENT") || !strings.Contains(string(said), "Invalid type: strng") {
		t.Errorf("%v: %s", err, said)
	}
}

func TestRouterSendsPromptsWhereTheirPrefixIs(t *testing.T) {
	client := needFleet(t)
	for _, pool := range []string{"a", "b"} {
		if _, err := client.Service.ResetPrefixCache(t.Context(), &cachev1.ResetPrefixCacheRequest{Pool: pool}); err != nil {
			t.Fatal(err)
		}
	}
	said := output(t, filepath.Join(examples, "router"), "-cachemgr", fleet.Cachemgr())
	lines := strings.Split(strings.TrimSpace(said), "\n")
	if len(lines) != 8 { // six prompts, two pools
		t.Fatal(said)
	}
	served := regexp.MustCompile(`^pool (\w+) held (\d+) of (\d+) tokens, found (\d+): ".+"$`)
	var pools []string
	for index, line := range lines[:6] {
		fields := served.FindStringSubmatch(line)
		if fields == nil || fields[2] != fields[4] {
			t.Fatalf("%q: what was found is not what was held", line)
		}
		pools = append(pools, fields[1])
		if held, _ := strconv.Atoi(fields[2]); (held > 0) != (index >= 2) {
			t.Errorf("%q of prompt %d", line, index)
		}
	}
	if pools[0] == pools[1] {
		t.Error("both documents are in one pool, and the other one is empty")
	}
	for index, pool := range pools {
		if pool != pools[index%2] {
			t.Errorf("prompt %d went to %s, its document is in %s", index, pool, pools[index%2])
		}
	}
	summary := regexp.MustCompile(`^pool \w+: 3 prompts, (\d+) of their \d+ tokens from the cache$`)
	for _, line := range lines[6:] {
		if fields := summary.FindStringSubmatch(line); fields == nil || fields[1] == "0" {
			t.Error(line)
		}
	}
}
