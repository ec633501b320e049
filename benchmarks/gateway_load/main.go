// An upstream that costs nothing and the clients that measure what stands before it. Neither may be the bottleneck of a benchmark.
//
// A request's max_tokens is the number of chunks that the upstream streams, its user the microseconds between them. Each chunk's text is
// the time at which it was written, in nanoseconds of the wall clock that both sides share.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

func main() {
	if len(os.Args) < 2 {
		log.Fatal("usage: gateway_load upstream|requests|streams|open|paced|hold [flags]")
	}
	mode := os.Args[1]
	flags := flag.NewFlagSet(mode, flag.ExitOnError)
	listen := flags.String("listen", "127.0.0.1:0", "address of the upstream")
	url := flags.String("url", "", "base URL of what is measured")
	model := flags.String("model", "chat", "model that is asked for")
	clients := flags.Int("clients", 16, "clients at once")
	seconds := flags.Float64("seconds", 5, "length of the measurement")
	chunks := flags.Int("chunks", 32, "chunks of a stream")
	interval := flags.Int("interval-us", 0, "microseconds between two chunks")
	rate := flags.Float64("rate", 100, "streams started a second")
	if err := flags.Parse(os.Args[2:]); err != nil {
		log.Fatal(err)
	}
	if mode == "upstream" {
		serve(*listen)
		return
	}
	load := &load{url: *url, model: *model, client: newClient(), recording: &atomic.Bool{}}
	length := time.Duration(*seconds * float64(time.Second))
	load.recording.Store(true)
	var answer map[string]any
	switch mode {
	case "requests":
		answer = load.closed(*clients, length, func(*result) error { return load.whole() })
	case "streams":
		answer = load.closed(*clients, length, func(r *result) error { return load.stream(r, *chunks, 0) })
	case "open":
		answer = load.open(*rate, length, *chunks, *interval)
	case "paced":
		answer = load.paced(*clients, length, *interval)
	case "hold":
		answer = load.hold(*clients)
	default:
		log.Fatalf("unknown mode %q", mode)
	}
	if err := json.NewEncoder(os.Stdout).Encode(answer); err != nil {
		log.Fatal(err)
	}
}

type body struct {
	Stream    bool   `json:"stream"`
	MaxTokens int    `json:"max_tokens"`
	User      string `json:"user"`
}

const (
	before = `{"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"chat","choices":[{"index":0,"delta":{"content":"`
	after  = `"},"logprobs":null,"finish_reason":null}]}` + "\n\n"
	whole  = `{"id":"chatcmpl-0123456789abcdef","object":"chat.completion","created":1700000000,"model":"chat","choices":[{"index":0,"message":{"role":"assistant","content":"hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":8,"completion_tokens":1,"total_tokens":9}}`
)

func serve(address string) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", answer)
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"object":"list","data":[{"id":"chat","object":"model"}]}`)
	})
	for _, path := range []string{"/health", "/ready", "/get_server_info", "/server_info", "/get_model_info", "/model_info"} {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "{}") })
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(listener.Addr())
	log.Fatal(http.Serve(listener, mux))
}

func answer(w http.ResponseWriter, r *http.Request) {
	var asked body
	if err := json.NewDecoder(r.Body).Decode(&asked); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if !asked.Stream {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, whole)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	interval := time.Duration(0)
	if micros, err := strconv.Atoi(asked.User); err == nil {
		interval = time.Duration(micros) * time.Microsecond
	}
	flusher := http.NewResponseController(w)
	started := time.Now()
	var buffer []byte
	for number := range asked.MaxTokens {
		if interval > 0 && number > 0 {
			timer := time.NewTimer(time.Until(started.Add(time.Duration(number) * interval)))
			select {
			case <-timer.C:
			case <-r.Context().Done():
				timer.Stop()
				return
			}
		}
		buffer = append(buffer[:0], "data: "...)
		buffer = append(buffer, before...)
		buffer = strconv.AppendInt(buffer, time.Now().UnixNano(), 10)
		buffer = append(buffer, after...)
		if _, err := w.Write(buffer); err != nil {
			return
		}
		if err := flusher.Flush(); err != nil {
			return
		}
	}
	io.WriteString(w, "data: [DONE]\n\n")
}

type load struct {
	url, model string
	client     *http.Client
	recording  *atomic.Bool
}

// What one client saw; never shared between goroutines.
type result struct {
	done, failed, chunks, all int
	ttft, delay               []float64
	lastError                 string
}

func newClient() *http.Client {
	return &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 10000, MaxIdleConns: 10000, DisableCompression: true}}
}

func (l *load) post(stream bool, chunks, interval int) (*http.Response, error) {
	text := fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"hello"}],"stream":%t,"max_tokens":%d,"user":"%d"}`, l.model, stream, chunks, interval)
	request, err := http.NewRequest("POST", l.url+"/v1/chat/completions", bytes.NewReader([]byte(text)))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer sk-benchmark")
	response, err := l.client.Do(request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != 200 {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 500))
		response.Body.Close()
		return nil, fmt.Errorf("status %d: %s", response.StatusCode, text)
	}
	return response, nil
}

func (l *load) whole() error {
	response, err := l.post(false, 1, 0)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	_, err = io.Copy(io.Discard, response.Body)
	return err
}

var (
	data    = []byte("data: ")
	content = []byte(`"content":"`)
	end     = []byte("[DONE]")
)

func (l *load) stream(r *result, chunks, interval int) error {
	began := time.Now()
	response, err := l.post(true, chunks, interval)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	lines := bufio.NewReaderSize(response.Body, 4096)
	seen := 0
	for {
		line, err := lines.ReadSlice('\n')
		if err != nil {
			return fmt.Errorf("after %d chunks: %w", seen, err)
		}
		if !bytes.HasPrefix(line, data) {
			continue
		}
		if bytes.HasPrefix(line[len(data):], end) {
			break
		}
		at := bytes.Index(line, content)
		if at < 0 {
			continue
		}
		number := line[at+len(content):]
		stop := bytes.IndexByte(number, '"')
		if stop <= 0 {
			continue
		}
		written, err := strconv.ParseInt(string(number[:stop]), 10, 64)
		if err != nil {
			return fmt.Errorf("chunk %q: %w", line, err)
		}
		r.all++
		if l.recording.Load() {
			if seen == 0 {
				r.ttft = append(r.ttft, time.Since(began).Seconds()*1000)
			}
			r.delay = append(r.delay, float64(time.Now().UnixNano()-written)/1e6)
			r.chunks++
		}
		seen++
	}
	_, err = io.Copy(io.Discard, lines)
	if seen != chunks {
		return fmt.Errorf("%d chunks instead of %d", seen, chunks)
	}
	return err
}

func (l *load) closed(clients int, length time.Duration, once func(*result) error) map[string]any {
	results := make([]result, clients)
	began := time.Now()
	var group sync.WaitGroup
	for number := range results {
		group.Go(func() {
			r := &results[number]
			for time.Since(began) < length {
				r.add(once(r))
			}
		})
	}
	group.Wait()
	return summary(results, time.Since(began))
}

// Streams begin at a fixed rate, whatever becomes of those before them.
func (l *load) open(rate float64, length time.Duration, chunks, interval int) map[string]any {
	count := int(rate * length.Seconds())
	results := make([]result, count)
	began := time.Now()
	var group sync.WaitGroup
	for number := range results {
		time.Sleep(time.Until(began.Add(time.Duration(float64(number) / rate * float64(time.Second)))))
		group.Go(func() {
			r := &results[number]
			r.add(l.stream(r, chunks, interval))
		})
	}
	group.Wait()
	return summary(results, time.Since(began))
}

// Every client holds one stream with a chunk each interval. Counted once all have begun, for `length`.
func (l *load) paced(clients int, length time.Duration, interval int) map[string]any {
	l.recording.Store(false)
	results := make([]result, clients)
	pace := time.Duration(interval) * time.Microsecond
	warm := 2 * time.Second
	chunks := int((length+warm+2*time.Second)/pace) + 1
	var group sync.WaitGroup
	for number := range results {
		// Spread over one interval, so that chunks do not come in bursts.
		time.Sleep(warm / 2 / time.Duration(clients))
		group.Go(func() {
			r := &results[number]
			r.add(l.stream(r, chunks, interval))
		})
	}
	time.Sleep(warm / 2)
	l.recording.Store(true)
	began := time.Now()
	time.Sleep(length)
	l.recording.Store(false)
	took := time.Since(began)
	group.Wait()
	found := summary(results, took)
	found["offered_chunks_s"] = float64(clients) / pace.Seconds()
	return found
}

// Holds open streams that have had one chunk, tells so on stdout, and lets go when stdin ends.
func (l *load) hold(clients int) map[string]any {
	bodies := make([]io.ReadCloser, 0, clients)
	for range clients {
		response, err := l.post(true, 2, 3_600_000_000)
		if err != nil {
			return map[string]any{"failed": 1, "error": err.Error()}
		}
		if _, err := bufio.NewReaderSize(response.Body, 512).ReadString('\n'); err != nil {
			return map[string]any{"failed": 1, "error": err.Error()}
		}
		bodies = append(bodies, response.Body)
	}
	fmt.Println("holding")
	io.Copy(io.Discard, os.Stdin)
	for _, one := range bodies {
		one.Close()
	}
	return map[string]any{"failed": 0, "done": clients}
}

func (r *result) add(err error) {
	if err != nil {
		r.failed++
		r.lastError = err.Error()
		time.Sleep(10 * time.Millisecond)
		return
	}
	r.done++
}

func summary(results []result, took time.Duration) map[string]any {
	total := result{}
	for _, r := range results {
		total.done += r.done
		total.failed += r.failed
		total.chunks += r.chunks
		total.all += r.all
		total.ttft = append(total.ttft, r.ttft...)
		total.delay = append(total.delay, r.delay...)
		if r.lastError != "" {
			total.lastError = r.lastError
		}
	}
	return map[string]any{
		"done": total.done, "failed": total.failed, "error": total.lastError, "chunks_in_all": total.all,
		"requests_s": float64(total.done) / took.Seconds(), "chunks_s": float64(total.chunks) / took.Seconds(),
		"ttft_ms": quantiles(total.ttft), "delay_ms": quantiles(total.delay),
	}
}

func quantiles(values []float64) map[string]float64 {
	if len(values) == 0 {
		return map[string]float64{}
	}
	slices.Sort(values)
	at := func(share float64) float64 { return values[min(len(values)-1, int(share*float64(len(values))))] }
	return map[string]float64{"p50": at(0.5), "p99": at(0.99), "max": values[len(values)-1]}
}
