/* Mounts a folder of files once more, read-only, as a network mount that answers late (FUSE; Linux, root).

       late_mount FOLDER PLACE MICROSECONDS

   Each lookup, opening, reading and question about a file is answered so much later, however many are asked at a time.
   The kernel asks for at most 128 KiB at a time, and caches what was read, as for any mount. The files below FOLDER are
   mapped before the mount, so that an answer is one copy of what is in memory. They must not change. The program ends
   when PLACE is unmounted. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { MOST_FILES = 65536, MOST_DUE = 65536, WORKERS = 4, WRITTEN = 4096, ROOM = 4 * WRITTEN, IN_FLIGHT = 32768 };
enum { FOREVER = 3600 }; /* seconds for which the kernel keeps names and sizes */

struct request {
    struct timespec due;
    char *data;
};

static struct request queue[MOST_DUE];
static unsigned first, last;
static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER, files_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t has_more = PTHREAD_COND_INITIALIZER;
static char *paths[MOST_FILES]; /* by node number, as the next two are */
static const char *contents[MOST_FILES];
static size_t sizes[MOST_FILES];
static unsigned files = FUSE_ROOT_ID + 1;
static long microseconds;
static int device;

static void answer(const struct fuse_in_header *in, int error, const void *data, size_t size) {
    struct fuse_out_header out = {sizeof out + (error ? 0 : size), -error, in->unique};
    struct iovec parts[] = {{&out, sizeof out}, {(void *)data, size}};
    if (writev(device, parts, error || !size ? 1 : 2) < 0 && errno != ENOENT) perror("late_mount");
}

static unsigned node_of(const char *path) {
    pthread_mutex_lock(&files_lock);
    unsigned node = FUSE_ROOT_ID;
    while (node < files && (!paths[node] || strcmp(paths[node], path))) node++;
    if (node == files && files < MOST_FILES) paths[files++] = strdup(path);
    pthread_mutex_unlock(&files_lock);
    return node;
}

static struct fuse_attr attributes(const struct stat *found, unsigned node) {
    struct fuse_attr out = {
        .ino = node, .size = found->st_size, .blocks = found->st_blocks, .mode = found->st_mode, .nlink = 1,
        .atime = found->st_atime, .mtime = found->st_mtime, .ctime = found->st_ctime, .blksize = 4096};
    return out;
}

static void look_up(const struct fuse_in_header *in, const char *name) {
    char path[4096];
    struct stat found;
    snprintf(path, sizeof path, "%s/%s", paths[in->nodeid], name);
    if (lstat(path, &found)) {
        answer(in, errno, NULL, 0);
        return;
    }
    struct fuse_entry_out out = {.nodeid = node_of(path), .entry_valid = FOREVER, .attr_valid = FOREVER};
    out.attr = attributes(&found, out.nodeid);
    answer(in, 0, &out, sizeof out);
}

static void get_attributes(const struct fuse_in_header *in) {
    struct stat found;
    if (lstat(paths[in->nodeid], &found)) {
        answer(in, errno, NULL, 0);
        return;
    }
    struct fuse_attr_out out = {.attr_valid = FOREVER, .attr = attributes(&found, in->nodeid)};
    answer(in, 0, &out, sizeof out);
}

static void read_file(const struct fuse_in_header *in, const struct fuse_read_in *wanted) {
    size_t left = wanted->offset < sizes[in->nodeid] ? sizes[in->nodeid] - wanted->offset : 0;
    answer(in, 0, contents[in->nodeid] + wanted->offset, left < wanted->size ? left : wanted->size);
}

static void read_folder(const struct fuse_in_header *in, const struct fuse_read_in *wanted) {
    char *data = calloc(1, wanted->size), *end = data;
    DIR *folder = opendir(paths[in->nodeid]);
    struct dirent *found;
    for (unsigned at = 0; folder && (found = readdir(folder)); at++) {
        if (at < wanted->offset) continue;
        size_t length = strlen(found->d_name);
        struct fuse_dirent *to = (struct fuse_dirent *)end;
        if (end - data + FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + length) > wanted->size) break;
        to->ino = found->d_ino, to->off = at + 1, to->namelen = length, to->type = found->d_type;
        memcpy(to->name, found->d_name, length);
        end += FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + length);
    }
    if (folder) closedir(folder);
    answer(in, 0, data, end - data);
    free(data);
}

static void handle(const struct fuse_in_header *in) {
    const void *rest = in + 1;
    static const struct fuse_open_out opened, kept = {.open_flags = FOPEN_KEEP_CACHE};
    static const struct fuse_statfs_out room = {.st = {.bsize = 4096, .namelen = 255}};
    switch (in->opcode) {
    case FUSE_LOOKUP: look_up(in, rest); break;
    case FUSE_GETATTR: get_attributes(in); break;
    case FUSE_OPEN: answer(in, 0, &kept, sizeof kept); break;
    case FUSE_READ: read_file(in, rest); break;
    case FUSE_OPENDIR: answer(in, 0, &opened, sizeof opened); break;
    case FUSE_READDIR: read_folder(in, rest); break;
    case FUSE_STATFS: answer(in, 0, &room, sizeof room); break;
    case FUSE_RELEASE: case FUSE_RELEASEDIR: case FUSE_FLUSH: answer(in, 0, NULL, 0); break;
    default: answer(in, ENOSYS, NULL, 0);
    }
}

static int is_late(unsigned operation) {
    return operation == FUSE_LOOKUP || operation == FUSE_GETATTR || operation == FUSE_OPEN || operation == FUSE_READ ||
           operation == FUSE_OPENDIR || operation == FUSE_READDIR;
}

static void *work(void *unused) {
    for (;;) {
        pthread_mutex_lock(&queue_lock);
        while (first == last) pthread_cond_wait(&has_more, &queue_lock);
        struct request next = queue[first++ % MOST_DUE];
        pthread_mutex_unlock(&queue_lock);
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next.due, NULL);
        handle((struct fuse_in_header *)next.data);
        free(next.data);
    }
    return unused;
}

static void begin(const struct fuse_in_header *in, const struct fuse_init_in *asked) {
    struct fuse_init_out out = {
        .major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION, .max_readahead = asked->max_readahead,
        .flags = asked->flags & (FUSE_ASYNC_READ | FUSE_MAX_PAGES | FUSE_PARALLEL_DIROPS), .max_write = WRITTEN,
        .max_background = IN_FLIGHT, .congestion_threshold = IN_FLIGHT, .max_pages = 256, .time_gran = 1};
    answer(in, 0, &out, sizeof out);
}

static int keep_file(const char *path, const struct stat *found, int kind, struct FTW *unused) {
    (void)unused;
    if (kind != FTW_F || !found->st_size) return 0;
    int number = open(path, O_RDONLY | O_CLOEXEC);
    void *data = mmap(NULL, found->st_size, PROT_READ, MAP_SHARED | MAP_POPULATE, number, 0);
    close(number);
    if (data == MAP_FAILED) return 1;
    unsigned node = node_of(path);
    contents[node] = data, sizes[node] = found->st_size;
    return 0;
}

int main(int count, char **words) {
    char options[128];
    if (count != 4) return 2;
    paths[FUSE_ROOT_ID] = words[1];
    microseconds = atol(words[3]);
    if (nftw(words[1], keep_file, 64, FTW_PHYS)) {
        perror(words[1]);
        return 1;
    }
    device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", device);
    if (device < 0 || mount("late", words[2], "fuse.late", MS_RDONLY | MS_NODEV | MS_NOSUID, options)) {
        perror("late_mount");
        return 1;
    }
    for (int at = 0; at < WORKERS; at++) {
        pthread_t thread;
        pthread_create(&thread, NULL, work, NULL);
    }
    for (;;) {
        char *data = malloc(ROOM);
        if (read(device, data, ROOM) < 0) {
            if (errno == EINTR || errno == EAGAIN || errno == ENOENT) {
                free(data);
                continue;
            }
            return errno == ENODEV ? 0 : 1; /* ENODEV: it was unmounted */
        }
        const struct fuse_in_header *in = (const void *)data;
        if (in->opcode == FUSE_INIT) {
            begin(in, (const void *)(in + 1));
        } else if (is_late(in->opcode)) {
            struct request next = {.data = data};
            clock_gettime(CLOCK_MONOTONIC, &next.due);
            next.due.tv_sec += microseconds / 1000000, next.due.tv_nsec += microseconds % 1000000 * 1000;
            if (next.due.tv_nsec >= 1000000000) next.due.tv_sec++, next.due.tv_nsec -= 1000000000;
            pthread_mutex_lock(&queue_lock);
            queue[last++ % MOST_DUE] = next;
            pthread_cond_signal(&has_more);
            pthread_mutex_unlock(&queue_lock);
            continue;
        } else if (in->opcode != FUSE_FORGET && in->opcode != FUSE_BATCH_FORGET && in->opcode != FUSE_INTERRUPT) {
            handle(in);
        }
        free(data);
    }
}
