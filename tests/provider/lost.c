/*
 * Collectives under MPI whose port goes while a member waits for a join. The event queue is made
 * up: the loss, which is of no join, and then the end of the join.
 */
#include "../../mpi/coll.c"

static struct group waits;
static int errors;

static ssize_t read_event(struct fid_eq *eq, uint32_t *event, void *buf, size_t len, uint64_t flags)
{
	return -FI_EAVAIL;
}

static ssize_t read_error(struct fid_eq *eq, struct fi_eq_err_entry *buf, uint64_t flags)
{
	void *context = errors++ ? &waits : NULL;
	*buf = (struct fi_eq_err_entry) { .context = context, .err = FI_ENETDOWN };
	return sizeof *buf;
}

/* No MPI is called. */
void face_progress(void) { }
int face_allgather(struct group *g, MPI_Comm comm, const void *one, void *all, int len)
{
	return MPI_ERR_OTHER;
}
int face_minimum(struct group *g, MPI_Comm comm, const int *one, int *least)
{
	return MPI_ERR_OTHER;
}
void face_opened(void) { }
void face_hold(struct group *g) { }
void face_release(struct group *g) { }
void face_ended(struct request *r, int err) { }
void face_say(int level, const char *what) { }
size_t face_size(MPI_Datatype type) { return 0; }
ptrdiff_t face_extent(MPI_Datatype type) { return 0; }
bool face_is_plain(MPI_Datatype type, size_t count, ptrdiff_t *before) { return true; }
struct reduction_type face_reduced(MPI_Datatype type)
{
	return (struct reduction_type) { 0 };
}
MPI_Datatype face_keep(MPI_Datatype type) { return type; }
void face_let_go(MPI_Datatype kept) { }
void face_pack(const struct part *from, void *to) { }
void face_unpack(const void *from, const struct part *to) { }

int main(void)
{
	struct fi_ops_eq ops = { .size = sizeof ops, .read = read_event, .readerr = read_error };
	struct fid_eq eq = { .ops = &ops };

	ours.eq = &eq;
	poll_eq();
	if (waits.join_end != 0)
		printf("BAD the loss ended a join: %d\n", waits.join_end);
	poll_eq();
	if (waits.join_end != -FI_ENETDOWN)
		printf("BAD the join: %d\n", waits.join_end);
	printf("ok end\n");
	return 0;
}
