#include "specimens.h"
#include <gtest/gtest.h>
namespace tensorplay {
TEST(X,y){ for (const Recipe& r: recipes()) { std::cerr<<r.name<<std::endl; Specimen s; try { s = r.make(); } catch (std::exception&e) { std::cerr<<"MAKE FAILED "<<e.what()<<"\n"; continue;} auto f = read(s.tensor); EXPECT_EQ(f.kind, r.kind)<<r.name; if (f.has_storage) EXPECT_EQ(f.data.origin, r.origin)<<r.name; else std::cerr<<"  no storage\n";} }
}
