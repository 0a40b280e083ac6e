/* Lets writes to files below a folder fail with ENOSPC after a number of bytes: a full disk without root.
 *
 *   cc -shared -fPIC -O2 -o disk_full.so disk_full.c -ldl      LD_PRELOAD=./disk_full.so python -m tests.faults
 *
 * Nothing fails until faults_disk_full(folder, bytes left) is called.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static volatile long left = -1;

void faults_disk_full(const char *path, long bytes) {
    snprintf(folder, sizeof folder, "%s/", path);
    left = bytes;
}

static int is_below(int fd) {
    char link[64], path[PATH_MAX];
    if (left < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strncmp(path, folder, strlen(folder)) == 0;
}

/* The bytes that may still be written, at most count; -1 with errno when there is no space. */
static ssize_t granted(int fd, size_t count) {
    if (count == 0 || !is_below(fd)) return (ssize_t)count;
    if (left == 0) {
        errno = ENOSPC;
        return -1;
    }
    size_t given = count < (size_t)left ? count : (size_t)left;
    left -= (long)given;
    return (ssize_t)given;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t count) {
    static __typeof__(&write) real;
    if (!real) real = REAL(write);
    ssize_t given = granted(fd, count);
    return given < 0 ? -1 : real(fd, data, (size_t)given);
}

ssize_t pwrite(int fd, const void *data, size_t count, off_t offset) {
    static __typeof__(&pwrite) real;
    if (!real) real = REAL(pwrite);
    ssize_t given = granted(fd, count);
    return given < 0 ? -1 : real(fd, data, (size_t)given, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t count, off64_t offset) {
    static __typeof__(&pwrite64) real;
    if (!real) real = REAL(pwrite64);
    ssize_t given = granted(fd, count);
    return given < 0 ? -1 : real(fd, data, (size_t)given, offset);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    static __typeof__(&writev) real;
    if (!real) real = REAL(writev);
    if (left < 0 || !is_below(fd)) return real(fd, parts, count);
    for (int i = 0; i < count; i++)
        if (parts[i].iov_len) return write(fd, parts[i].iov_base, parts[i].iov_len);
    return 0;
}

ssize_t sendfile(int out, int in, off_t *offset, size_t count) {
    static ssize_t (*real)(int, int, off_t *, size_t);
    if (!real) real = (ssize_t (*)(int, int, off_t *, size_t))dlsym(RTLD_NEXT, "sendfile");
    ssize_t given = granted(out, count);
    return given < 0 ? -1 : real(out, in, offset, (size_t)given);
}

ssize_t sendfile64(int out, int in, off64_t *offset, size_t count) {
    static ssize_t (*real)(int, int, off64_t *, size_t);
    if (!real) real = (ssize_t (*)(int, int, off64_t *, size_t))dlsym(RTLD_NEXT, "sendfile64");
    ssize_t given = granted(out, count);
    return given < 0 ? -1 : real(out, in, offset, (size_t)given);
}

ssize_t copy_file_range(int in, off64_t *in_offset, int out, off64_t *out_offset, size_t count, unsigned flags) {
    static ssize_t (*real)(int, off64_t *, int, off64_t *, size_t, unsigned);
    if (!real)
        real = (ssize_t (*)(int, off64_t *, int, off64_t *, size_t, unsigned))dlsym(RTLD_NEXT, "copy_file_range");
    ssize_t given = granted(out, count);
    return given < 0 ? -1 : real(in, in_offset, out, out_offset, (size_t)given, flags);
}

int posix_fallocate(int fd, off_t offset, off_t length) {
    static int (*real)(int, off_t, off_t);
    if (!real) real = (int (*)(int, off_t, off_t))dlsym(RTLD_NEXT, "posix_fallocate");
    if (is_below(fd) && length > left) return ENOSPC;
    return real(fd, offset, length);
}

int statvfs(const char *path, struct statvfs *result) {
    static int (*real)(const char *, struct statvfs *);
    if (!real) real = (int (*)(const char *, struct statvfs *))dlsym(RTLD_NEXT, "statvfs");
    int code = real(path, result);
    if (code == 0 && left >= 0 && strncmp(path, folder, strlen(folder) - 1) == 0)
        result->f_bavail = result->f_bfree = (fsblkcnt_t)left / result->f_frsize;
    return code;
}

int statvfs64(const char *path, struct statvfs64 *result) {
    static int (*real)(const char *, struct statvfs64 *);
    if (!real) real = (int (*)(const char *, struct statvfs64 *))dlsym(RTLD_NEXT, "statvfs64");
    int code = real(path, result);
    if (code == 0 && left >= 0 && strncmp(path, folder, strlen(folder) - 1) == 0)
        result->f_bavail = result->f_bfree = (fsblkcnt64_t)left / result->f_frsize;
    return code;
}
