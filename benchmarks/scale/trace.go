package main

import (
	"bufio"
	"encoding/json"
	"os"
)

const vocabulary = 128_000

// Request is a prompt by its block ids, and the number of tokens that its answer has.
type Request struct {
	InputLength  int     `json:"input_length"`
	OutputLength int     `json:"output_length"`
	BlockTokens  int     `json:"block_tokens"`
	BlockIDs     []int64 `json:"block_ids"`
}

func readTrace(path string) ([]Request, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var requests []Request
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		var request Request
		if err := json.Unmarshal(lines.Bytes(), &request); err != nil {
			return nil, err
		}
		requests = append(requests, request)
	}
	return requests, lines.Err()
}

// tokens returns the prompt: equal block ids have equal tokens, and what is behind the last full block is this request's own.
func (r Request) tokens(own int64) []int32 {
	tokens := make([]int32, r.InputLength)
	for index := range tokens {
		block := own<<32 | 1<<62
		if at := index / r.BlockTokens; at < len(r.BlockIDs) {
			block = r.BlockIDs[at]
		}
		tokens[index] = int32(mix(uint64(block)*1_000_003+uint64(index)) % vocabulary)
	}
	return tokens
}

// mix is the finalizer of SplitMix64.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
