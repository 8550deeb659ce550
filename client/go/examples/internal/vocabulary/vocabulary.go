// Package vocabulary reads the vocabulary of a byte-level BPE tokenizer, as in a
// tokenizer.json of Hugging Face, for examples that show text.
package vocabulary

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// Vocabulary maps tokens to bytes and back.
type Vocabulary struct {
	ids     map[string]int32 // by the token's bytes
	bytes   map[int32]string
	longest int
}

// Load reads tokenizer.json in a folder.
func Load(folder string) (*Vocabulary, error) {
	path := filepath.Join(folder, "tokenizer.json")
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var file struct {
		AddedTokens []struct{ Content string } `json:"added_tokens"`
		Decoder     struct{ Type string }
		Model       struct {
			Type  string
			Vocab map[string]int32
		}
	}
	if err := json.Unmarshal(content, &file); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if file.Model.Type != "BPE" || file.Decoder.Type != "ByteLevel" {
		return nil, fmt.Errorf("%s: not a byte-level BPE tokenizer", path)
	}
	for _, special := range file.AddedTokens { // never written, never read as text
		delete(file.Model.Vocab, special.Content)
	}
	return of(file.Model.Vocab), nil
}

func of(tokens map[string]int32) *Vocabulary {
	letters := byteOfLetter()
	found := &Vocabulary{ids: map[string]int32{}, bytes: map[int32]string{}}
	for token, id := range tokens {
		var text []byte
		for _, letter := range token {
			text = append(text, letters[letter])
		}
		found.ids[string(text)], found.bytes[id] = id, string(text)
		found.longest = max(found.longest, len(text))
	}
	return found
}

// byteOfLetter is the alphabet of byte-level BPE: printable bytes stand for
// themselves, the others for the characters from U+0100 on.
func byteOfLetter() map[rune]byte {
	letters := map[rune]byte{}
	next := rune(0x100)
	for value := range 0x100 {
		switch {
		case value > 0x20 && value < 0x7f, value > 0xa0 && value != 0xad:
			letters[rune(value)] = byte(value)
		default:
			letters[next] = byte(value)
			next++
		}
	}
	return letters
}

// Text is a token's bytes, which may be part of a character; empty for special tokens.
func (v *Vocabulary) Text(token int32) string { return v.bytes[token] }

// Tokens cuts a text into the longest tokens there are, from left to right. The
// tokenizer itself merges by rank, so its tokens may be others; the text is the same.
func (v *Vocabulary) Tokens(text string) ([]int32, error) {
	var tokens []int32
	for len(text) > 0 {
		length := min(v.longest, len(text))
		for length > 0 {
			if id, ok := v.ids[text[:length]]; ok {
				tokens = append(tokens, id)
				break
			}
			length--
		}
		if length == 0 {
			return nil, fmt.Errorf("the vocabulary has no token for byte %#x", text[0])
		}
		text = text[length:]
	}
	return tokens, nil
}
