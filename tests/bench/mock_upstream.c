/* An upstream that costs next to nothing, so that what is in front of it can be measured: a single-threaded HTTP/1.1
 * server on loopback with the answers of OpenAI's API.
 *
 *     gcc -O2 -o mock_upstream mock_upstream.c
 *     ./mock_upstream PORT:DELAY_MS [PORT:DELAY_MS ...]
 *
 * POST /v1/chat/completions and /v1/completions get one fixed completion of about 600 bytes at once; or, where the body
 * has "stream": true, 50 events and [DONE], the first at once and each next one DELAY_MS later. A body that holds the
 * text [delay=N] sets its own delay, so that one port serves all of them. Without a delay, each stream gets one event
 * per turn of the loop, as a batching engine steps.
 *
 * /health, /v1/models, and /stats, which tells what has come so far; all else is 404. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define EVENTS_PER_STREAM 50
#define MAX_CONNECTIONS 8192
#define READ_BYTES 8192
#define MAX_UNSENT_BYTES 65536 /* A stream without delay waits while so much of it is unsent. */
#define MAX_CHUNKED_BYTES (1 << 20)

#define EVENT_HEAD                                                                                                     \
    "data: {\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\","                \
    "\"created\":1764500000,\"model\":\"mock\",\"choices\":[{\"index\":0,\"delta\":"
static const char TOKEN_EVENT[] = EVENT_HEAD
    "{\"role\":\"assistant\",\"content\":\" token\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n";
static const char LAST_EVENT[] = EVENT_HEAD "{},\"logprobs\":null,\"finish_reason\":\"stop\"}]}\n\n";
static const char END_OF_STREAM[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
static const char STREAM_HEAD[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                                  "cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
static const char COMPLETION[] =
    "{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion\",\"created\":1764500000,"
    "\"model\":\"mock\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"The capital of "
    "France is Paris. It lies on the river Seine, in the north of the country, and has been its largest city since the "
    "Middle Ages; about two million people live within its limits, and the wider region counts more than twelve "
    "million.\",\"refusal\":null,\"tool_calls\":[]},\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":"
    "{\"prompt_tokens\":42,\"completion_tokens\":50,\"total_tokens\":92},\"system_fingerprint\":null}";
static const char MODELS[] =
    "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1764500000,\"owned_by\":\"mock\","
    "\"root\":\"mock\",\"max_model_len\":32768}]}";
static const char HEALTH[] = "{\"status\":\"ok\"}";

typedef struct {
    char *bytes;
    size_t start, end, capacity;
} Buffer;

typedef struct {
    int fd;
    bool is_listener, waits_to_write, closes;
    int default_delay_ms, delay_ms;
    int events_left;
    int slot; /* in `streaming`; -1 while nothing is streamed */
    long next_event_us;
    Buffer in, out;
} Connection;

typedef struct {
    const char *path;
    bool is_post, closes;
    const char *body;
    size_t body_bytes, whole_bytes;
} Request;

enum Parsed { INCOMPLETE, COMPLETE, BROKEN };

static Connection *connections[MAX_CONNECTIONS]; /* by descriptor */
static Connection *streaming[MAX_CONNECTIONS];
static int streaming_count;
static int poller;
static long requests_so_far, streams_so_far;

static long now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000L + now.tv_nsec / 1000;
}

static void make_room(Buffer *buffer, size_t bytes) {
    if (buffer->capacity - buffer->end >= bytes + 1) return;
    buffer->capacity = (buffer->end + bytes + 1) * 2;
    buffer->bytes = realloc(buffer->bytes, buffer->capacity);
}

static void append(Buffer *buffer, const char *bytes, size_t count) {
    make_room(buffer, count);
    memcpy(buffer->bytes + buffer->end, bytes, count);
    buffer->end += count;
}

static void watch(Connection *connection, bool waits_to_write) {
    if (connection->waits_to_write == waits_to_write) return;
    connection->waits_to_write = waits_to_write;
    struct epoll_event event = {.events = EPOLLIN | (waits_to_write ? EPOLLOUT : 0), .data.fd = connection->fd};
    epoll_ctl(poller, EPOLL_CTL_MOD, connection->fd, &event);
}

static void begin_stream(Connection *connection) {
    connection->events_left = EVENTS_PER_STREAM;
    connection->next_event_us = now_us();
    connection->slot = streaming_count;
    streaming[streaming_count++] = connection;
}

static void end_stream(Connection *connection) {
    if (connection->slot < 0) return;
    Connection *last = streaming[--streaming_count];
    streaming[connection->slot] = last;
    last->slot = connection->slot;
    connection->slot = -1;
}

static void drop(Connection *connection) {
    end_stream(connection);
    connections[connection->fd] = NULL;
    close(connection->fd);
    free(connection->in.bytes);
    free(connection->out.bytes);
    free(connection);
}

/* All functions below that return a bool say whether the connection is still good. */

static bool flush_out(Connection *connection) {
    Buffer *out = &connection->out;
    while (out->start < out->end) {
        ssize_t sent = send(connection->fd, out->bytes + out->start, out->end - out->start, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) return false;
        if (sent < 0) {
            watch(connection, true);
            return true;
        }
        out->start += sent;
    }
    out->start = out->end = 0;
    watch(connection, false);
    return !connection->closes || connection->events_left;
}

static bool respond(Connection *connection, const char *status, const char *body) {
    char head[256];
    int head_bytes = snprintf(head, sizeof head,
        "HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n", status, strlen(body));
    append(&connection->out, head, head_bytes);
    append(&connection->out, body, strlen(body));
    return flush_out(connection);
}

static bool send_event(Connection *connection) {
    bool is_last = --connection->events_left == 0;
    const char *event = is_last ? LAST_EVENT : TOKEN_EVENT;
    size_t event_bytes = is_last ? sizeof LAST_EVENT - 1 : sizeof TOKEN_EVENT - 1;
    char size[16];
    append(&connection->out, size, snprintf(size, sizeof size, "%zx\r\n", event_bytes));
    append(&connection->out, event, event_bytes);
    append(&connection->out, "\r\n", 2);
    connection->next_event_us += connection->delay_ms * 1000L;
    if (is_last) {
        append(&connection->out, END_OF_STREAM, sizeof END_OF_STREAM - 1);
        end_stream(connection);
    }
    return flush_out(connection);
}

/* The value of a header, or NULL. `name` has its colon. */
static const char *header(const char *head, const char *end, const char *name) {
    for (const char *line = head; line && line < end;) {
        if (!strncasecmp(line, name, strlen(name))) {
            line += strlen(name);
            return line + strspn(line, " ");
        }
        line = memchr(line, '\n', end - line);
        if (line) line++;
    }
    return NULL;
}

static enum Parsed parse_chunked(Request *request, const char *start, const char *end) {
    static char body[MAX_CHUNKED_BYTES + 1];
    request->body = body;
    for (const char *chunk = start; chunk < end;) {
        const char *line_end = memmem(chunk, end - chunk, "\r\n", 2);
        if (!line_end) return INCOMPLETE;
        long bytes = strtol(chunk, NULL, 16);
        chunk = line_end + 2;
        if (bytes < 0 || request->body_bytes + bytes > MAX_CHUNKED_BYTES) return BROKEN;
        if (end - chunk < bytes + 2) return INCOMPLETE;
        memcpy(body + request->body_bytes, chunk, bytes);
        request->body_bytes += bytes;
        chunk += bytes + 2;
        if (bytes == 0) {
            request->whole_bytes += chunk - start;
            return COMPLETE;
        }
    }
    return INCOMPLETE;
}

static enum Parsed parse(Connection *connection, Request *request) {
    Buffer *in = &connection->in;
    if (!in->end) return INCOMPLETE;
    const char *start = in->bytes, *end = in->bytes + in->end;
    in->bytes[in->end] = 0; /* make_room() always leaves a byte for it */
    const char *head_end = memmem(start, in->end, "\r\n\r\n", 4);
    if (!head_end) return INCOMPLETE;
    const char *space = memchr(start, ' ', head_end - start);
    /* "PRI" is how a client asks whether we speak HTTP/2. */
    if (!space || !strncmp(start, "PRI ", 4)) return BROKEN;
    const char *body = head_end + 4, *length = header(start, head_end, "content-length:");
    const char *connection_header = header(start, head_end, "connection:");
    *request = (Request){.path = space + 1, .is_post = !strncmp(start, "POST ", 5), .whole_bytes = body - start};
    request->closes = connection_header && !strncasecmp(connection_header, "close", 5);
    if (header(start, head_end, "transfer-encoding:")) return parse_chunked(request, body, end);
    request->body = body;
    request->body_bytes = length ? strtoul(length, NULL, 10) : 0;
    request->whole_bytes += request->body_bytes;
    if ((size_t)(end - body) >= request->body_bytes) return COMPLETE;
    if (end == body && header(start, head_end, "expect:")) {
        append(&connection->out, "HTTP/1.1 100 Continue\r\n\r\n", 25);
        return flush_out(connection) ? INCOMPLETE : BROKEN;
    }
    return INCOMPLETE;
}

static bool has(const Request *request, const char *text) {
    return memmem(request->body, request->body_bytes, text, strlen(text)) != NULL;
}

static bool is_for(const Request *request, const char *path) { return !strncmp(request->path, path, strlen(path)); }

static bool complete(Connection *connection, const Request *request) {
    if (!has(request, "\"stream\":true") && !has(request, "\"stream\": true"))
        return respond(connection, "200 OK", COMPLETION);
    const char *delay = memmem(request->body, request->body_bytes, "[delay=", 7);
    connection->delay_ms = delay ? atoi(delay + 7) : connection->default_delay_ms;
    streams_so_far++;
    append(&connection->out, STREAM_HEAD, sizeof STREAM_HEAD - 1);
    begin_stream(connection);
    return send_event(connection);
}

static bool answer(Connection *connection, const Request *request) {
    if (request->is_post && (is_for(request, "/v1/chat/completions") || is_for(request, "/v1/completions")))
        return complete(connection, request);
    if (is_for(request, "/v1/models")) return respond(connection, "200 OK", MODELS);
    if (is_for(request, "/health")) return respond(connection, "200 OK", HEALTH);
    if (!is_for(request, "/stats")) return respond(connection, "404 Not Found", "{}");
    char stats[128];
    snprintf(stats, sizeof stats, "{\"requests\":%ld,\"streams\":%ld,\"active\":%d}", requests_so_far, streams_so_far,
        streaming_count);
    return respond(connection, "200 OK", stats);
}

/* Answer whatever has come in whole, one after the other. */
static bool answer_all(Connection *connection) {
    while (!connection->events_left) {
        Request request;
        enum Parsed parsed = parse(connection, &request);
        if (parsed != COMPLETE) return parsed == INCOMPLETE;
        requests_so_far++;
        connection->closes = request.closes;
        if (!answer(connection, &request)) return false;
        Buffer *in = &connection->in;
        in->end -= request.whole_bytes;
        memmove(in->bytes, in->bytes + request.whole_bytes, in->end);
    }
    return true;
}

static bool read_some(Connection *connection) {
    make_room(&connection->in, READ_BYTES);
    Buffer *in = &connection->in;
    ssize_t count = recv(connection->fd, in->bytes + in->end, in->capacity - in->end - 1, 0);
    if (count < 0 && errno == EAGAIN) return true;
    if (count <= 0) return false;
    in->end += count;
    return answer_all(connection);
}

static Connection *add(int fd, int delay_ms, bool is_listener) {
    Connection *connection = calloc(1, sizeof *connection);
    *connection = (Connection){.fd = fd, .default_delay_ms = delay_ms, .is_listener = is_listener, .slot = -1};
    connections[fd] = connection;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    return connection;
}

static void accept_all(const Connection *listener) {
    int fd, on = 1;
    while ((fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        if (fd >= MAX_CONNECTIONS) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        add(fd, listener->default_delay_ms, false);
    }
}

static void listen_on(int port, int delay_ms) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 4096)) {
        perror("bind");
        exit(1);
    }
    add(fd, delay_ms, true);
}

/* Milliseconds until the next event of any stream; -1 is no stream. */
static int wait_ms(void) {
    long next_us = -1;
    for (int slot = 0; slot < streaming_count; slot++) {
        if (!streaming[slot]->delay_ms) return 0;
        if (next_us < 0 || streaming[slot]->next_event_us < next_us) next_us = streaming[slot]->next_event_us;
    }
    if (next_us < 0) return -1;
    long left_us = next_us - now_us();
    return left_us > 0 ? (int)((left_us + 999) / 1000) : 0;
}

static bool step(Connection *connection, long time_us) {
    bool is_good = true;
    if (connection->delay_ms)
        while (is_good && connection->events_left && connection->next_event_us <= time_us)
            is_good = send_event(connection);
    else if (connection->out.end < MAX_UNSENT_BYTES)
        is_good = send_event(connection);
    return is_good && (connection->events_left || answer_all(connection));
}

static void step_streams(void) {
    long time_us = now_us();
    /* From the end: a stream that ends has its place taken by the last, which has had its turn. */
    for (int slot = streaming_count - 1; slot >= 0; slot--) {
        if (slot >= streaming_count) continue;
        Connection *connection = streaming[slot];
        if (!step(connection, time_us)) drop(connection);
    }
}

static void handle(const struct epoll_event *event) {
    Connection *connection = connections[event->data.fd];
    if (!connection) return;
    if (connection->is_listener) {
        accept_all(connection);
        return;
    }
    bool is_good = !(event->events & EPOLLOUT) || flush_out(connection);
    if (is_good && event->events & (EPOLLIN | EPOLLHUP | EPOLLERR)) is_good = read_some(connection);
    if (!is_good) drop(connection);
}

int main(int count, char **arguments) {
    signal(SIGPIPE, SIG_IGN);
    poller = epoll_create1(0);
    for (int index = 1; index < count; index++) {
        int port = 0, delay_ms = 0;
        sscanf(arguments[index], "%d:%d", &port, &delay_ms);
        listen_on(port, delay_ms);
    }
    struct epoll_event events[512];
    for (;;) {
        int ready = epoll_wait(poller, events, 512, wait_ms());
        for (int index = 0; index < ready; index++) handle(&events[index]);
        step_streams();
    }
}
