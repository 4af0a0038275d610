/* A load of streamed chat completions: a single-threaded client of one server on loopback.
 *
 *     gcc -O2 -o sse_load sse_load.c
 *     ./sse_load PORT CONNECTIONS SECONDS BODY_FILE [HEADER ...]
 *
 * Each connection asks for one stream after the other and is kept between them. None is begun after SECONDS; those
 * under way have 30 more to end. In the body, the first NUMBER becomes the stream's number in six digits, so that no
 * two bodies are the same.
 *
 * Prints one JSON object: streams that ended well and others, times to the first "data:" and of whole streams, events
 * per second (lines of "data:", [DONE] among them), and socket reads per event, where below 1 events came together. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
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

#define PLACEHOLDER "NUMBER"
#define DATA "\ndata:"
#define DONE "[DONE]"
#define LAST_CHUNK "0\r\n\r\n"
#define TAIL_BYTES 64 /* kept of what was read before, as what is looked for may come in pieces */
#define READ_BYTES (1 << 17)
#define MAX_BODY_BYTES (1 << 20)
#define MAX_STREAMS 1000000
#define GRACE_MS 30000

typedef struct {
    int fd;
    int status, events;
    bool is_done;
    double began_ms, first_event_ms;
    char tail[TAIL_BYTES];
    size_t tail_bytes;
} Stream;

enum Ending { NOT_YET, WELL, BADLY };

static int poller, port;
static char *request, *number_in_request;
static size_t request_bytes;
static double stop_at_ms;
static long begun, failed, running, events_so_far, reads_so_far;
static int succeeded;
static double first_event_times[MAX_STREAMS], whole_times[MAX_STREAMS];

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

static int compare(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static double percentile(const double *sorted, int count, double share) {
    return count ? sorted[(int)(share * (count - 1) + 0.5)] : -1;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void build_request(const char *body_file, char **headers, int header_count) {
    static char body[MAX_BODY_BYTES];
    FILE *file = fopen(body_file, "rb");
    if (!file) fail(body_file);
    size_t body_bytes = fread(body, 1, sizeof body, file);
    fclose(file);
    FILE *out = open_memstream(&request, &request_bytes);
    fprintf(out,
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
        "Content-Type: application/json\r\nContent-Length: %zu\r\n",
        port, body_bytes);
    for (int index = 0; index < header_count; index++) fprintf(out, "%s\r\n", headers[index]);
    fputs("\r\n", out);
    fwrite(body, 1, body_bytes, out);
    fclose(out);
    number_in_request = memmem(request, request_bytes, PLACEHOLDER, strlen(PLACEHOLDER));
}

static void open_connection(Stream *stream) {
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int on = 1;
    stream->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(stream->fd, (struct sockaddr *)&address, sizeof address)) fail("connect");
    setsockopt(stream->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(stream->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = stream};
    epoll_ctl(poller, EPOLL_CTL_ADD, stream->fd, &event);
}

static void begin(Stream *stream) {
    *stream = (Stream){.fd = stream->fd, .began_ms = now_ms()};
    if (number_in_request) {
        char digits[32];
        snprintf(digits, sizeof digits, "%06ld", begun % 1000000);
        memcpy(number_in_request, digits, strlen(PLACEHOLDER));
    }
    if (send(stream->fd, request, request_bytes, MSG_NOSIGNAL) != (ssize_t)request_bytes) perror("send");
    begun++;
    running++;
}

/* Count the events that end behind the old tail: those within it were counted before. */
static void count_events(Stream *stream, const char *bytes, size_t count) {
    const char *found = bytes, *end = bytes + count;
    while ((found = memmem(found, end - found, DATA, strlen(DATA)))) {
        found += strlen(DATA);
        if (found <= bytes + stream->tail_bytes) continue;
        stream->events++;
        if (!stream->first_event_ms) stream->first_event_ms = now_ms() - stream->began_ms;
    }
}

static void keep_tail(Stream *stream, const char *bytes, size_t count) {
    stream->tail_bytes = count < TAIL_BYTES ? count : TAIL_BYTES;
    memcpy(stream->tail, bytes + count - stream->tail_bytes, stream->tail_bytes);
}

static enum Ending read_some(Stream *stream) {
    static char bytes[TAIL_BYTES + READ_BYTES + 1];
    memcpy(bytes, stream->tail, stream->tail_bytes);
    ssize_t received = recv(stream->fd, bytes + stream->tail_bytes, READ_BYTES, 0);
    if (received < 0 && errno == EAGAIN) return NOT_YET;
    if (received <= 0) return BADLY;
    reads_so_far++;
    size_t count = stream->tail_bytes + received;
    bytes[count] = 0;
    if (!stream->status && count >= 12) stream->status = atoi(bytes + strlen("HTTP/1.1 "));
    if (stream->status && stream->status != 200) {
        if (failed < 2) fprintf(stderr, "status %d: %.300s\n", stream->status, bytes);
        return BADLY;
    }
    count_events(stream, bytes, count);
    stream->is_done = stream->is_done || memmem(bytes, count, DONE, strlen(DONE));
    keep_tail(stream, bytes, count);
    size_t last = strlen(LAST_CHUNK);
    return stream->is_done && count >= last && !memcmp(bytes + count - last, LAST_CHUNK, last) ? WELL : NOT_YET;
}

static void end(Stream *stream, enum Ending ending) {
    running--;
    if (ending == WELL && succeeded < MAX_STREAMS) {
        first_event_times[succeeded] = stream->first_event_ms;
        whole_times[succeeded++] = now_ms() - stream->began_ms;
        events_so_far += stream->events;
    } else {
        failed++;
        close(stream->fd);
        open_connection(stream);
    }
    if (now_ms() < stop_at_ms) begin(stream);
}

static void report(double elapsed_s) {
    qsort(first_event_times, succeeded, sizeof(double), compare);
    qsort(whole_times, succeeded, sizeof(double), compare);
    printf("{\"streams\":%d,\"errors\":%ld,\"unfinished\":%ld,", succeeded, failed, running);
    printf("\"elapsed_s\":%.3f,", elapsed_s);
    printf("\"events\":%ld,\"events_per_s\":%.0f,", events_so_far, events_so_far / elapsed_s);
    printf("\"reads_per_event\":%.3f,", events_so_far ? (double)reads_so_far / events_so_far : 0);
    printf("\"first_event_p50_ms\":%.3f,", percentile(first_event_times, succeeded, 0.5));
    printf("\"first_event_p99_ms\":%.3f,", percentile(first_event_times, succeeded, 0.99));
    printf("\"stream_p50_ms\":%.2f,", percentile(whole_times, succeeded, 0.5));
    printf("\"stream_p99_ms\":%.2f}\n", percentile(whole_times, succeeded, 0.99));
}

int main(int count, char **arguments) {
    if (count < 5) {
        fprintf(stderr, "usage: sse_load PORT CONNECTIONS SECONDS BODY_FILE [HEADER ...]\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    port = atoi(arguments[1]);
    int connections = atoi(arguments[2]);
    build_request(arguments[4], arguments + 5, count - 5);
    poller = epoll_create1(0);
    Stream *streams = calloc(connections, sizeof *streams);
    for (int index = 0; index < connections; index++) open_connection(&streams[index]);
    double start_ms = now_ms();
    stop_at_ms = start_ms + atof(arguments[3]) * 1e3;
    for (int index = 0; index < connections; index++) begin(&streams[index]);
    struct epoll_event events[256];
    while (running && now_ms() < stop_at_ms + GRACE_MS) {
        int ready = epoll_wait(poller, events, 256, 1000);
        for (int index = 0; index < ready; index++) {
            Stream *stream = events[index].data.ptr;
            enum Ending ending = read_some(stream);
            if (ending != NOT_YET) end(stream, ending);
        }
    }
    report((now_ms() - start_ms) / 1e3);
}
