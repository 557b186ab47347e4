/*
 * Multicast: three endpoints join a group, one sends, and the two others receive.
 */
#include <string.h>

#include "check.h"

#define MEMBERS 3

struct member {
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_eq *eq;
	struct fid_ep *ep;
	struct fid_mc *mc;
	char in[64];
};

static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;

/* A group: Ethernet group address, number as that of an endpoint, and eight bytes 0. */
static const uint8_t group[16] = { 0x01, 0x00, 0x5e, 0x01, 0x02, 0x03, 0x2f, 0x1d };

static void open_member(struct member *m)
{
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_DATA };
	struct fi_eq_attr eq = { 0 };

	must("fi_av_open", fi_av_open(domain, &av, &m->av, NULL));
	must("fi_cq_open", fi_cq_open(domain, &cq, &m->cq, NULL));
	must("fi_eq_open", fi_eq_open(fabric, &eq, &m->eq, NULL));
	must("fi_endpoint", fi_endpoint(domain, info, &m->ep, NULL));
	must("bind", fi_ep_bind(m->ep, &m->cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(m->ep, &m->av->fid, 0));
	expect("fi_join without a queue", fi_join(m->ep, group, 0, &m->mc, m), -FI_ENOEQ);
	must("bind", fi_ep_bind(m->ep, &m->eq->fid, 0));
	must("fi_enable", fi_enable(m->ep));
}

static void join(struct member *m)
{
	struct fi_eq_entry entry = { 0 };
	uint8_t station[16] = { 2 };
	uint32_t event = 0;

	expect("fi_join of a station", fi_join(m->ep, station, 0, &m->mc, m), -FI_EINVAL);
	expect("fi_join of NULL", fi_join(m->ep, NULL, 0, &m->mc, m), -FI_EINVAL);
	expect("fi_join with FI_PEEK", fi_join(m->ep, group, FI_PEEK, &m->mc, m), -FI_EBADFLAGS);
	must("fi_join", fi_join(m->ep, group, 0, &m->mc, m));
	expect("event", fi_eq_read(m->eq, &event, &entry, sizeof entry, 0), sizeof entry);
	expect("FI_JOIN_COMPLETE", event, FI_JOIN_COMPLETE);
	expect("its fid", entry.fid == &m->mc->fid, 1);
	expect("its context", entry.context == m, 1);
	expect("fi_mc_addr", fi_mc_addr(m->mc) != FI_ADDR_NOTAVAIL, 1);
}

/* Whether a completion comes within a while. */
static int completes(struct member *m, struct fi_cq_data_entry *entry, fi_addr_t *src, double s)
{
	for (double end = now() + s; now() < end;) {
		ssize_t n = fi_cq_readfrom(m->cq, entry, 1, src);
		if (n == 1)
			return 1;
		if (n != -FI_EAGAIN)
			must("fi_cq_readfrom", n);
	}
	return 0;
}

static void talk(struct member *m)
{
	struct iovec iov = { .iov_base = "to all", .iov_len = 6 };
	struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .data = 99 };
	struct fi_cq_data_entry entry;
	fi_addr_t src, from = known(m[1].av, m[0].ep);

	msg.addr = fi_mc_addr(m[0].mc);
	for (int i = 0; i < MEMBERS; i++)
		must("fi_recv", fi_recv(m[i].ep, m[i].in, sizeof m[i].in, NULL, FI_ADDR_UNSPEC, m[i].in));
	must("fi_sendmsg", fi_sendmsg(m[0].ep, &msg, FI_MULTICAST | FI_REMOTE_CQ_DATA | FI_COMPLETION));
	expect("sent", completes(&m[0], &entry, &src, 20), 1);
	expect("flags", entry.flags == (FI_SEND | FI_MSG), 1);
	for (int i = 1; i < MEMBERS; i++) {
		expect("received", completes(&m[i], &entry, &src, 20), 1);
		expect("context", entry.op_context == m[i].in, 1);
		expect("data", entry.data, 99);
		expect("bytes", entry.len == 6 && memcmp(m[i].in, "to all", 6) == 0, 1);
		expect("source", src == (i == 1 ? from : FI_ADDR_NOTAVAIL), 1);
	}
	expect("the sender hears itself", completes(&m[0], &entry, &src, 0.1), 0);
	msg.addr = from;
	expect("FI_MULTICAST to one", fi_sendmsg(m[1].ep, &msg, FI_MULTICAST), -FI_EINVAL);
	msg.addr = fi_mc_addr(m[0].mc);
	expect("FI_DELIVERY_COMPLETE",
	       fi_sendmsg(m[0].ep, &msg, FI_MULTICAST | FI_DELIVERY_COMPLETE), -FI_EBADFLAGS);
	must("fi_close", fi_close(&m[0].mc->fid));
	expect("to a group that was left", fi_sendmsg(m[0].ep, &msg, FI_MULTICAST), -FI_EINVAL);
}

int main(void)
{
	static struct member m[MEMBERS];
	struct fi_info *hints = fi_allocinfo();

	hints->ep_attr->type = FI_EP_RDM;
	hints->caps = FI_MSG | FI_SOURCE | FI_MULTICAST;
	hints->mode = 0;
	hints->fabric_attr->prov_name = strdup("barewire");
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &info));
	expect("FI_MULTICAST is granted", (info->caps & FI_MULTICAST) != 0, 1);
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	must("fi_domain", fi_domain(fabric, info, &domain, NULL));
	for (int i = 0; i < MEMBERS; i++)
		open_member(&m[i]);
	for (int i = 0; i < MEMBERS; i++)
		join(&m[i]);
	talk(m);
	for (int i = 0; i < MEMBERS; i++) {
		if (i > 0)
			must("fi_close", fi_close(&m[i].mc->fid));
		must("fi_close", fi_close(&m[i].ep->fid));
		must("fi_close", fi_close(&m[i].cq->fid));
		must("fi_close", fi_close(&m[i].eq->fid));
		must("fi_close", fi_close(&m[i].av->fid));
	}
	must("fi_close", fi_close(&domain->fid));
	must("fi_close", fi_close(&fabric->fid));
	fi_freeinfo(info);
	fi_freeinfo(hints);
	printf(bad ? "BAD end\n" : "ok end\n");
	return bad != 0;
}
